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

# Longer names are not compared with those of presets.
_LONGEST_NAME = 200
# Fields that are 1 or more in every family.
_POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclasses.dataclass(frozen=True)
class ExplainedModel:
    """A model with its sizes.

    Attributes:
        name: the name in the report.
        loaded_config: the configuration; None for a preset, which makes it on demand.
        architecture: the sizes, or None if no formula knows the family.
        unknown: the reason why the sizes are unknown, or empty.
        source: the origin of the sizes, for the report.
        preset: the name of the preset, or empty.
    """

    name: str
    loaded_config: PreTrainedConfig | None
    architecture: Architecture | None
    unknown: str
    source: str
    preset: str = ""

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return preset_config(self.preset) if self.loaded_config is None else self.loaded_config


def explained_model(model: Any, dtype: str | None = None) -> ExplainedModel:
    """Return the model that a name, a path, a transformers configuration or a transformers model describes.

    Args:
        model: see `explain`. A compiled model is accepted too.
        dtype: the dtype of the weights, instead of that of the configuration.

    Raises:
        CheckpointError: for a folder or config from which no model can be built.
        InputError: for an unknown name, with the most similar preset, and for a model without a configuration.
    """
    if isinstance(model, (str, os.PathLike)):
        return _by_name(os.fspath(model), dtype)
    config = _config_of(model)
    source = f"the {type(config).__name__} of the call"
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
        names = [*preset_names(), DEMO]
        similar = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.4)
        hint = f"; did you mean {similar[0]}?" if similar else "."
        raise InputError(
            f"model {text!r} is unknown, and no folder or file has that name{hint} It must be a checkpoint "
            f"folder, a config.json, or one of {one_of(names)}",
            name="model",
            value=text,
            expected=tuple(names),
        ) from None
    name = DEMO if text == DEMO else Path(text).resolve().parent.name if path.is_file() else Path(text).resolve().name
    return _explained(load_config(path), name, dtype, f"config: {path}")


def _config_of(model: Any) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    # torch.compile(model) wraps the module and stores the original under this name.
    original = getattr(model, "_orig_mod", model)
    config = original if isinstance(original, PreTrainedConfig) else getattr(original, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise InputError(
            f"a {type(original).__name__} has no transformers configuration with its sizes; pass a model that has one, "
            "a checkpoint folder, a config.json, or the name of a preset",
            name="model",
            value=type(original).__name__,
        )
    return config


def _weights_dtype(model: Any) -> torch.dtype | None:
    """Return the dtype of most weights of `model`, by bytes, or None for a configuration, which has no weights.

    A configuration has at most the dtype of the checkpoint, and the model may have been converted since.
    """
    import torch

    from moepass.runtime.banks.banked_modules import BankedParameter

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
    """Return a copy of `config` with another dtype, or `config` itself if the dtype is the same or None."""
    configs = [config, config.get_text_config()]
    if dtype is None or all(nested.dtype == dtype for nested in configs):
        return config
    changed = copy.deepcopy(config)
    for nested in (changed, changed.get_text_config()):
        nested.dtype = dtype
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
        # Published weights are nearly always bf16. The capture must use the dtype of the figures.
        config = _with_dtype(config, text.dtype or torch.bfloat16)
    try:
        architecture = from_config(config, name=name, dtype=dtype)
    except InputError as error:
        return ExplainedModel(name, config, None, str(error), source)
    if not architecture.moe_layers:
        return ExplainedModel(name, config, None, f"{name} has no layer with experts", source)
    return ExplainedModel(name, config, architecture, "", source)
