"""The models that `explain` accepts: a preset, a checkpoint folder, a config file, a configuration, a model."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepass.models.checkpoint.checkpoint_folders import DEMO, load_config, resolve_model
from moepass.models.errors import CheckpointError, InputError, one_of
from moepass.models.sizes.architecture import Architecture, short_dtype
from moepass.models.sizes.config_checks import check_config, check_raw_config
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import preset, preset_config, preset_names, presets_source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# No preset is suggested for a longer name.
_LONGEST_NAME = 200
# Fields that make no model of any family where they are less than 1.
_POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class ExplainedModel:
    """`architecture` is None where no formula knows the family's sizes; `unknown` then says so.

    `source` is where the sizes come from. `preset` is the name of the preset that was asked for, whose configuration is
    made when it is needed; empty for anything else, which has been `given`.
    """

    name: str
    given: PreTrainedConfig | None
    architecture: Architecture | None
    unknown: str
    source: str
    preset: str = ""

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        return preset_config(self.preset) if self.given is None else self.given


def explained_model(model: Any, dtype: str | None = None) -> ExplainedModel:
    """Find the configuration of `model`: a name or path, a transformers configuration or model, compiled or not.

    `dtype` replaces that of the weights in the architecture. Raises CheckpointError and InputError, the latter with
    the nearest preset where a name is unknown.
    """
    if isinstance(model, (str, os.PathLike)):
        return _by_name(os.fspath(model), dtype)
    config = _config_of(model)
    source = f"the {type(config).__name__} that was given"
    return _explained(_with_dtype(config, _weights_dtype(model)), None, dtype, source)


def _by_name(text: str, dtype: str | None) -> ExplainedModel:
    if text in preset_names():
        sizes = preset(text)
        if dtype is not None:
            sizes = dataclasses.replace(sizes, dtype=short_dtype(dtype))
        return ExplainedModel(text, None, sizes, "", f"preset: {presets_source()}", preset=text)
    try:
        path = resolve_model(text, config_alone=True)
    except CheckpointError:
        if os.path.exists(text) or os.sep in text or len(text) > _LONGEST_NAME:
            raise
        known = [*preset_names(), DEMO]
        close = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"model {text!r} is unknown, and no folder or file of that name exists; {hint}Give the folder of a "
            f"checkpoint, a config.json, or one of {one_of(known)}",
            name="model",
            value=text,
            expected=tuple(known),
        ) from None
    name = DEMO if text == DEMO else Path(text).resolve().parent.name if path.is_file() else Path(text).resolve().name
    return _explained(load_config(path), name, dtype, f"config: {path}")


def _config_of(model: Any) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    # torch.compile(model) wraps the module; it keeps the original under this name.
    original = getattr(model, "_orig_mod", model)
    config = original if isinstance(original, PreTrainedConfig) else getattr(original, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise InputError(
            f"a {type(original).__name__} has no transformers configuration that tells its sizes; give a model that "
            "has one, a checkpoint folder, a config.json, or the name of a preset",
            name="model",
            value=type(original).__name__,
        )
    return config


def _weights_dtype(model: Any) -> torch.dtype | None:
    """The dtype of most weights of `model`, by bytes; None for a configuration, which has no weights.

    A configuration says what a checkpoint was saved in, if anything: a model may have been converted since.
    """
    import torch

    from moepass.runtime.offload.offload import BankedParameter

    original = getattr(model, "_orig_mod", model)
    if not isinstance(original, torch.nn.Module):
        return None
    nbytes: Counter[torch.dtype] = Counter()
    for value in original.parameters():
        if value.is_floating_point():
            nbytes[value.dtype] += value.nbytes
    for module in original.modules():
        if isinstance(module, BankedParameter):
            nbytes[module.spec.torch_dtype] += module.spec.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else None


def _with_dtype(config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedConfig:
    """A copy of `config` that says `dtype`; `config` itself where there is nothing else to say."""
    parts = [config, config.get_text_config()]
    if dtype is None or all(part.dtype == dtype for part in parts):
        return config
    changed = copy.deepcopy(config)
    for part in (changed, changed.get_text_config()):
        part.dtype = dtype
    return changed


def _explained(config: PreTrainedConfig, name: str | None, dtype: str | None, source: str) -> ExplainedModel:
    import torch

    name = name or str(config.model_type)
    text = config.get_text_config()
    for field in _POSITIVE:
        value = getattr(text, field, None)
        if isinstance(value, int) and value < 1:
            raise InputError(
                f"{field} of {name} is {value}; it must be 1 or more", name=field, value=value, expected="1 or more"
            )
    check_raw_config(config.to_dict(), name)
    check_config(config, name)
    if config.dtype is None:
        # Published weights are bf16 nearly always; what is captured has to be what the numbers are of.
        config = _with_dtype(config, text.dtype or torch.bfloat16)
    try:
        architecture = from_config(config, name=name, dtype=dtype)
    except InputError as error:
        return ExplainedModel(name, config, None, str(error), source)
    if not architecture.moe_layers:
        return ExplainedModel(name, config, None, f"{name} has no layer with experts", source)
    return ExplainedModel(name, config, architecture, "", source)
