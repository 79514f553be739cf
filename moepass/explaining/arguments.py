"""The arguments of `explain`: numbers, the machine, the memory budget, and the forms in which it accepts a model."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepass.models.checkpoint.checkpoint_folders import DEMO, load_config, resolve_model
from moepass.models.checkpoint.model_classes import check_config, check_raw_config
from moepass.models.errors import CheckpointError, InputError, one_of
from moepass.models.limits import MOST_RANKS, MOST_SLOTS, MOST_TOKENS, check_limit
from moepass.models.sizes.architecture import Architecture, short_dtype
from moepass.models.sizes.families import from_config
from moepass.models.sizes.presets import preset, preset_config, preset_names, presets_source
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.runtime.profiles.hardware_profiles import load_hardware

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# [Empirical] The remaining memory is for the allocator, the kernels' workspaces and the driver; vLLM's default.
DEFAULT_MEMORY_SHARE = 0.9
# Longer names are not compared with those of presets.
_LONGEST_NAME = 200
# Fields that are 1 or more in every family.
_POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def check_numbers(batch: int, seq: int, tokens: int | None, slots: int | None, ranks: int | None) -> None:
    """Raise InputError for an argument that is not an integer of at least 1, or that exceeds its limit."""
    numbers = {"batch": batch, "seq": seq, "tokens": tokens, "slots": slots, "ranks": ranks}
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError.wrong(name, value, "a whole number from 1 on")
    per_step = batch * seq if tokens is None else tokens
    what = f"batch {batch} times seq {seq}" if tokens is None else "tokens"
    check_limit(what, per_step, MOST_TOKENS, "use several steps")
    if slots is not None:
        check_limit("slots", slots, MOST_SLOTS, "more slots hide no more transfers")
    if ranks is not None:
        check_limit("ranks", ranks, MOST_RANKS, "moepass plans for no more devices")


def machine_of(hardware: str | os.PathLike[str] | Hardware, ranks: int | None) -> Hardware:
    """Return the profile of a machine, with `ranks` devices if that is not None."""
    machine = hardware if isinstance(hardware, Hardware) else load_hardware(hardware)
    if ranks is None or ranks == machine.ranks:
        return machine
    name = re.sub(rf"^{machine.ranks}x", f"{ranks}x", machine.name)
    return dataclasses.replace(with_ranks(machine, ranks), name=name)


def memory_budget(machine: Hardware, requested: float | None) -> float:
    """Return the bytes to use on each device. Raises InputError if `requested` exceeds its memory."""
    most = machine.memory_bytes.value
    if requested is None:
        return DEFAULT_MEMORY_SHARE * most
    if not 0 < requested <= most:
        text = (
            f"the memory budget is {requested:.0f} bytes; it must be between 1 and {most:.0f}, the memory of a device "
            f"of {machine.name}"
        )
        raise InputError(text, name="memory_budget", value=requested, expected=(1, most))
    return requested


@dataclasses.dataclass(frozen=True)
class ExplainedModel:
    """A model with its sizes, or with the reason why they are unknown, and their source.

    `loaded_config` is None for a preset, whose configuration is made on demand.
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

    A compiled model is accepted too. `dtype` replaces the dtype of the configuration. Raises CheckpointError for a
    folder or config from which no model can be built, and InputError for an unknown name, with the most similar preset,
    and for a model without a configuration.
    """
    if isinstance(model, (str, os.PathLike)):
        return _by_name(os.fspath(model), dtype)
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) stores the wrapped module under this name
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
        message = (
            f"model {text!r} is unknown, and no folder or file has that name{hint} It must be a checkpoint "
            f"folder, a config.json, or one of {one_of(names)}"
        )
        raise InputError(message, name="model", value=text, expected=tuple(names)) from None
    name = DEMO if text == DEMO else Path(text).resolve().parent.name if path.is_file() else Path(text).resolve().name
    return _explained(load_config(path), name, dtype, f"config: {path}")


def _config_of(model: Any) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        text = (
            f"a {type(model).__name__} has no transformers configuration with its sizes; pass a model that has one, "
            "a checkpoint folder, a config.json, or the name of a preset"
        )
        raise InputError(text, name="model", value=type(model).__name__)
    return config


def _weights_dtype(model: Any) -> torch.dtype | None:
    """Return the dtype of most weights of `model`, by bytes, or None for a configuration, which has no weights.

    A configuration has at most the dtype of the checkpoint, and the model may have been converted since.
    """
    import torch

    from moepass.runtime.banks.banked_modules import BankedParameter

    if not isinstance(model, torch.nn.Module):
        return None
    nbytes: Counter[torch.dtype] = Counter()
    for value in model.parameters():
        if value.is_floating_point():
            nbytes[value.dtype] += value.nbytes
    for module in model.modules():
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
            message = f"{field} of {name} is {value}; it must be 1 or more"
            raise InputError(message, name=field, value=value, expected="1 or more")
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
