"""Well-known models by name: their sizes, and transformers configurations of these sizes, without files of the models.

`presets.json` has the numbers and their sources. Extra prediction layers (MTP) are ignored, because a prefill pass does
not run them. `preset_sizes.json` has the architectures that `families.py` reads from them, so that sizes are available
without importing transformers; a test compares both.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moepass.models.errors import InputError, one_of
from moepass.models.sizes.architecture import Architecture, Layer
from moepass.models.sizes.families import from_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PRESETS_FILE = Path(__file__).with_name("presets.json")
SIZES_FILE = Path(__file__).with_name("preset_sizes.json")


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `presets.json`.

    Attributes:
        sliding_every: of every n layers, the first n - 1 have the window; 0 if no layer has it
        quantization: the published checkpoint's `quantization_config`
    """

    model_type: str
    layers: int
    dense_first: int
    hidden: int
    moe_intermediate: int
    experts: int
    top_k: int
    shared_experts: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    dense_intermediate: int | None = None
    sliding_window: int | None = None
    sliding_every: int = 0
    mla: dict[str, int] = {}
    config: dict[str, bool | int | float | None] = {}
    quantization: dict[str, str | list[str | int]] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    note: str
    models: dict[str, Preset]
    sources: str


@lru_cache(maxsize=1)
def _file() -> _File:
    return msgspec.json.decode(PRESETS_FILE.read_bytes(), type=_File)


class StoredSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `preset_sizes.json`: each kind of layer once, and the kind of each layer.

    `architecture` has no layers.
    """

    architecture: Architecture
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]

    @staticmethod
    def of(architecture: Architecture) -> StoredSizes:
        """Return the entry of `architecture`."""
        kinds = tuple(architecture.layer_counts)
        order = tuple(kinds.index(layer) for layer in architecture.layers)
        return StoredSizes(dataclasses.replace(architecture, layers=()), kinds, order)

    def whole(self) -> Architecture:
        """Return the architecture with its layers."""
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


def preset(name: str, *, layers: int | None = None) -> Architecture:
    """Return the sizes of a well-known model. `layers` and errors are those of `preset_config`."""
    _check_name(name)
    if layers is None:
        return _sizes()[name].whole()
    return from_config(preset_config(name, layers=layers), name=name, dtype="bf16")


def _check_name(name: str) -> None:
    if name not in _file().models:
        raise InputError(
            f"no preset is called {name!r}; it must be one of {one_of(preset_names())}",
            name="preset",
            value=name,
            expected=tuple(preset_names()),
        )


def preset_config(name: str, *, layers: int | None = None) -> PreTrainedConfig:
    """Return a transformers configuration of a well-known model.

    Args:
        name: One of `preset_names()`.
        layers: Keep only this many layers, at most `layers - 1` of which are leading dense ones.

    Raises:
        InputError: The name is unknown, or the model has fewer layers.
    """
    _check_name(name)
    entry = _file().models[name]
    if layers is not None and not 1 <= layers <= entry.layers:
        raise InputError(
            f"layers is {layers}; {name} has 1 to {entry.layers}",
            name="layers",
            value=layers,
            expected=range(1, entry.layers + 1),
        )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: PreTrainedConfig = CONFIG_MAPPING[entry.model_type](**_values(entry, layers or entry.layers))
    config.use_cache = False
    return config


def _values(entry: Preset, layers: int) -> dict[str, Any]:
    """Return the constructor's arguments.

    The name of an expert's width depends on whether dense layers have another one.
    """
    values: dict[str, Any] = {
        "vocab_size": entry.vocab,
        "hidden_size": entry.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": entry.heads,
        "num_key_value_heads": entry.kv_heads or entry.heads,
        "num_experts_per_tok": entry.top_k,
        _EXPERT_COUNT.get(entry.model_type, "num_local_experts"): entry.experts,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **entry.mla,
        **entry.config,
    }
    if entry.head_dim is not None:
        values["head_dim"] = entry.head_dim
    if entry.model_type in _OWN_EXPERT_WIDTH:
        values["moe_intermediate_size"] = entry.moe_intermediate
    values["intermediate_size"] = entry.dense_intermediate or entry.moe_intermediate
    if entry.model_type in _DENSE_FIRST:
        values.update(n_shared_experts=entry.shared_experts, first_k_dense_replace=min(entry.dense_first, layers - 1))
    if entry.sliding_every:
        kinds = ["sliding_attention"] * (entry.sliding_every - 1) + ["full_attention"]
        values["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
        values["sliding_window"] = entry.sliding_window
    if entry.quantization:
        values["quantization_config"] = dict(entry.quantization)
    return values


_EXPERT_COUNT = {
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
}
_OWN_EXPERT_WIDTH = frozenset({"qwen3_moe", "deepseek_v3", "glm4_moe"})
_DENSE_FIRST = frozenset({"deepseek_v3", "glm4_moe"})
