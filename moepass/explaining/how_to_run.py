"""The call that runs a model with the strategy of a report."""

from __future__ import annotations

import json

from moepass.explaining.report_parts import SchedulePart, StrategyPart
from moepass.models.homes import HOMES, home_named
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.decisions import ASYNCEP, RESIDENT

# Above this number the call refers to the report's list of layers.
_MOST_LAYERS_SHOWN = 12
# transformers' configuration class that loads a format dequantised.
_LOADERS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def how_to_run(
    strategy: StrategyPart,
    schedule: SchedulePart | None,
    checkpoint: str | None,
    shortage: str,
    dtype: str,
    device: str,
    stored: WeightFormat | None = None,
) -> str:
    """Python to run, or why there is none. `checkpoint` is the folder of a checkpoint, None for anything else.

    `shortage` says why no strategy fits, empty if one does. `dtype` is that of the experts, `device` the kind that
    computes, `stored` the format of a quantised checkpoint.
    """
    if dtype == "fp8":
        return "moepass runs no fp8 experts yet: --dtype bf16 says what it does with this model today"
    compiled = 'compiled = torch.compile(model, backend="asyncep")'
    if shortage:
        return f"{shortage}; see the advice"
    if strategy.chosen == RESIDENT:
        return compiled
    if strategy.chosen != ASYNCEP or schedule is None:
        return f"moepass does not run {strategy.chosen}: run it with the engine that you use today"
    words = [f"home={json.dumps(strategy.home)}", f"slots={schedule.slots}"]
    if schedule.resident_layers:
        are_few = len(schedule.resident_layers) <= _MOST_LAYERS_SHOWN
        layers = list(schedule.resident_layers) if are_few else "report.schedule.resident_layers"
        words.append(f"resident_layers={layers}")
    options, remark = ", ".join(words), _remark(strategy.home, device)
    if checkpoint is not None and stored is not None:
        # load_pretrained reads no quantised weights.
        loading = _load_dequantised(stored, json.dumps(checkpoint))
        return f"{loading}; moepass.offload_experts(model, {options}); {compiled}{remark}"
    if checkpoint is not None:
        return f"model = moepass.load_pretrained({json.dumps(checkpoint)}, {options}); {compiled}{remark}"
    return f"moepass.offload_experts(model, {options}); {compiled}{remark}"


def _load_dequantised(stored: WeightFormat, checkpoint: str) -> str:
    """Python that loads a checkpoint of that format in the dtype that moepass runs. `checkpoint` is a literal."""
    return (
        f"model = transformers.AutoModelForCausalLM.from_pretrained({checkpoint}, "
        f"quantization_config=transformers.{_LOADERS[stored.name]}(dequantize=True))"
    )


def _remark(home: str, device: str) -> str:
    """A Python comment where `device` cannot compute from `home` yet."""
    devices = home_named(home).devices
    if device in devices:
        return ""
    others = " or ".join(
        f"--home {name}" for name, one in sorted(HOMES.items()) if device in one.devices and one.travel
    )
    return (
        f"  # home {home} works on {' and '.join(devices)} only so far, not on {device}: {others} plans what runs there"
    )
