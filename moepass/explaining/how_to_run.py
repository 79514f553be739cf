"""The call that runs a model as a report chose."""

from __future__ import annotations

import json

from moepass.explaining.report import SchedulePart, StrategyPart
from moepass.models.homes import HOMES, home_named
from moepass.passes.planner.strategies import ASYNCEP, RESIDENT

# A longer list of layers is told by where it stands in the report.
_MOST_LAYERS_SHOWN = 12


def how_to_run(
    strategy: StrategyPart, schedule: SchedulePart | None, checkpoint: str | None, fits: bool, dtype: str, device: str
) -> str:
    """Python to run, or in words why there is none. `checkpoint` is the folder of a checkpoint, None for anything else.

    `fits` says whether the chosen strategy keeps to the memory budget. `dtype` is that of the experts,
    `device` the kind that computes.
    """
    if dtype == "fp8":
        return "moepass runs no fp8 experts yet: --dtype bf16 says what it does with this model today"
    compiled = 'compiled = torch.compile(model, backend="asyncep")'
    if not fits:
        return "nothing fits this machine; see the advice"
    if strategy.chosen == RESIDENT:
        return compiled
    if strategy.chosen != ASYNCEP or schedule is None:
        return f"moepass does not run {strategy.chosen}: run it with the engine that you use today"
    words = [f"home={json.dumps(strategy.home)}", f"slots={schedule.slots}"]
    if schedule.resident_layers:
        are_few = len(schedule.resident_layers) <= _MOST_LAYERS_SHOWN
        layers = list(schedule.resident_layers) if are_few else "report.schedule.resident_layers"
        words.append(f"resident_layers={layers}")
    options = ", ".join(words)
    remark = _remark(strategy.home, device)
    if checkpoint is not None:
        return f"model = moepass.load_pretrained({json.dumps(checkpoint)}, {options}); {compiled}{remark}"
    return f"moepass.offload_experts(model, {options}); {compiled}{remark}"


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
