"""The Python code that runs a model with the strategy of a report."""

from __future__ import annotations

import json

from moepass.explaining.report_parts import SchedulePart, StrategyPart
from moepass.models.homes import HOMES, home_named
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT

# With more layers, the code refers to the report's list of layers.
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
    """Return Python code to run, or the reason why there is no such code.

    Args:
        strategy: the chosen strategy.
        schedule: its schedule, or None.
        checkpoint: the folder of a checkpoint, or None for any other model.
        shortage: the reason why no strategy fits, or empty.
        dtype: the dtype of the experts.
        device: the kind of device that computes.
        stored: the format of a quantised checkpoint, or None.
    """
    if dtype == "fp8":
        return "moepass cannot run fp8 experts yet: use --dtype bf16 for a plan that it can run"
    compiled = 'compiled = torch.compile(model, backend="asyncep")'
    if shortage:
        return f"{shortage}; see the advice"
    if strategy.chosen == RESIDENT:
        return compiled
    if strategy.chosen != ASYNCEP or schedule is None:
        return f"moepass does not run {strategy.chosen}: use an engine that does"
    arguments = [f"home={json.dumps(strategy.home)}", f"slots={schedule.slots}"]
    if schedule.resident_layers:
        are_few = len(schedule.resident_layers) <= _MOST_LAYERS_SHOWN
        layers = list(schedule.resident_layers) if are_few else "report.schedule.resident_layers"
        arguments.append(f"resident_layers={layers}")
    options, remark = ", ".join(arguments), _remark(strategy.home, device)
    if checkpoint is not None and stored is not None:
        # load_pretrained cannot read quantised weights.
        loading = _load_dequantised(stored, json.dumps(checkpoint))
        return f"{loading}; moepass.offload_experts(model, {options}); {compiled}{remark}"
    if checkpoint is not None:
        return f"model = moepass.load_pretrained({json.dumps(checkpoint)}, {options}); {compiled}{remark}"
    return f"moepass.offload_experts(model, {options}); {compiled}{remark}"


def _load_dequantised(stored: WeightFormat, checkpoint: str) -> str:
    """Return Python code that loads a quantised checkpoint, dequantised. `checkpoint` is a string literal."""
    return (
        f"model = transformers.AutoModelForCausalLM.from_pretrained({checkpoint}, "
        f"quantization_config=transformers.{_LOADERS[stored.name]}(dequantize=True))"
    )


def _remark(home: str, device: str) -> str:
    """Return a Python comment if `device` cannot compute from `home` yet, or else an empty text."""
    devices = home_named(home).devices
    if device in devices:
        return ""
    alternatives = " or ".join(
        f"--home {name}" for name, record in sorted(HOMES.items()) if device in record.devices and record.travel
    )
    return f"  # home {home} only works on {' and '.join(devices)} so far; plan for {device} with {alternatives}"
