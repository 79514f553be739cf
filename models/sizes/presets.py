"""Well-known models by name: their sizes, and transformers configurations of these sizes, without files of the models.

`presets.json` has the numbers and their sources. Extra prediction layers (MTP) are ignored, because a prefill pass does
not run them. `preset_sizes.json` has the architectures that `families.py` reads from them, so that sizes are available
without importing transformers; a test compares both.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moepass.models.errors import InputError, one_of
from moepass.models.sizes.architecture import Architecture, Layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PRESETS_FILE = Path(__file__).with_name("presets.json")
SIZES_FILE = Path(__file__).with_name("preset_sizes.json")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    note: str
    models: dict[str, dict[str, Any]]
    sources: str


@lru_cache(maxsize=1)
def _file() -> _File:
    return msgspec.json.decode(PRESETS_FILE.read_bytes(), type=_File)


class StoredSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `preset_sizes.json`: each kind of layer, and the kind of each layer; `architecture` has no layers."""

    architecture: Architecture
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]

    def whole(self) -> Architecture:
        """Return the architecture with the list of layers written out."""
        return dataclasses.replace(self.architecture, layers=tuple(self.kinds[kind] for kind in self.order))


@lru_cache(maxsize=1)
def _sizes() -> dict[str, StoredSizes]:
    return msgspec.json.decode(SIZES_FILE.read_bytes(), type=dict[str, StoredSizes])


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` and `preset_config` accept."""
    return tuple(_file().models)


def presets_source() -> str:
    """Return the source of the presets' numbers."""
    return _file().sources


def preset(name: str) -> Architecture:
    """Return the sizes of a well-known model. Raises InputError if the name is unknown."""
    _check_name(name)
    return _sizes()[name].whole()


def _check_name(name: str) -> None:
    if name not in _file().models:
        text = f"no preset is called {name!r}; it must be one of {one_of(preset_names())}"
        raise InputError(text, name="preset", value=name, expected=preset_names())


def preset_config(name: str, *, layers: int | None = None) -> PreTrainedConfig:
    """Return a transformers configuration of a well-known model.

    With `layers` only this many layers are kept, at most `layers - 1` of them leading dense layers. Raises InputError
    if the name is unknown, or the model has fewer layers.
    """
    _check_name(name)
    values = copy.deepcopy(_file().models[name])
    all_layers = values["num_hidden_layers"]
    if layers is not None:
        if not 1 <= layers <= all_layers:
            text = f"layers is {layers}; {name} has 1 to {all_layers}"
            raise InputError(text, name="layers", value=layers, expected=range(1, all_layers + 1))
        values["num_hidden_layers"] = layers
        if "first_k_dense_replace" in values:
            values["first_k_dense_replace"] = min(values["first_k_dense_replace"], layers - 1)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = CONFIG_MAPPING[values.pop("model_type")]
    config: PreTrainedConfig = family(**values, tie_word_embeddings=False, dtype="bfloat16")
    config.use_cache = False
    return config
