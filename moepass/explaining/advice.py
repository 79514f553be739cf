"""Advice on a forecast: changes that improve it, each with its figure, and the Python code that runs the model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

from moepass.explaining.report import SchedulePart, StrategyPart
from moepass.models.errors import InputError
from moepass.models.homes import HOMES, home_named
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT
from moepass.passes.machine.hardware import with_ranks
from moepass.passes.machine.layer_times import sequences_of
from moepass.passes.planner.forecast import Forecast
from moepass.passes.planner.host_memory import host_memory
from moepass.passes.planner.model_problem import least_memory_bytes
from moepass.passes.planner.strategies import Setting, homes_of

_MOST_RANKS = 64
# The share of the step below which waiting is not worth mentioning.
_WORTH_SAYING = 0.01
# With more layers, the code refers to the report's list of layers.
_MOST_LAYERS_SHOWN = 12
# transformers' configuration class that loads a format dequantised.
_LOADERS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def advice(made: Forecast, crossover: int | None, refusals: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences of advice, the most useful first. None of them means that nothing can be improved.

    Args:
        made: the forecast of the chosen home.
        crossover: tokens per rank from which asyncep beats AllToAll, or None.
        refusals: the reasons of refused blocks.
    """
    if not made.cost(ASYNCEP).fits and made.chosen != RESIDENT:
        nothing = "asyncep fits with none of the changes that were tried: other homes, fewer tokens, fp8, more ranks"
        return tuple(_changes_that_fit(made.setting)) or (nothing,)
    refused = f"the figures assume that all blocks are rewritten, but {len(refusals)} were refused and run unchanged"
    return (*_waiting(made, crossover), *([refused] if refusals else []))


def _changes_that_fit(setting: Setting) -> Iterator[str]:
    """Yield single changes that would make asyncep fit into the memory budget."""
    if home := _fitting_home(setting):
        yield f"asyncep fits with --home {home}"
        return
    fewer = setting.sequences.tokens // 2
    while fewer >= 1:
        sequences = sequences_of(fewer, setting.sequences.length)
        if home := _fitting_home(dataclasses.replace(setting, sequences=sequences)):
            yield f"asyncep fits with {fewer} tokens per rank and step (--home {home})"
            break
        fewer //= 2
    if setting.dtype != "fp8" and "fp8" in setting.hardware.flops:
        stored = setting.architecture.stored
        as_stored = stored if stored is not None and stored.name == "fp8" else None
        if home := _fitting_home(dataclasses.replace(setting, dtype="fp8", stored=as_stored)):
            yield f"asyncep fits with --dtype fp8 (--home {home})"
    ranks = 2 * setting.ranks
    while ranks <= _MOST_RANKS:
        if home := _fitting_home(dataclasses.replace(setting, hardware=with_ranks(setting.hardware, ranks))):
            yield f"asyncep fits with --ranks {ranks} (--home {home})"
            break
        ranks *= 2


def _fitting_home(setting: Setting) -> str | None:
    return next((home for home in homes_of(setting) if _fits(setting, home)), None)


def _fits(setting: Setting, home: str) -> bool:
    try:
        least = least_memory_bytes(setting, home)
        return least <= setting.budget_bytes and host_memory(setting, home, least).fits is not False
    except InputError:
        return False  # the machine has no such link


def _waiting(made: Forecast, crossover: int | None) -> Iterator[str]:
    if made.simulation is None or made.chosen == RESIDENT:
        return
    sequences, threshold = made.setting.sequences, made.saturation.tokens
    waits = made.simulation.exposed_seconds / made.simulation.step_seconds
    if waits > _WORTH_SAYING and sequences.tokens < threshold:
        batch = math.ceil(threshold / sequences.length)
        yield (
            f"with {threshold} or more tokens per rank and step ({batch} sequences of {sequences.length}), computation "
            f"hides all transfers with a margin of {made.saturation.values['gamma']:g}"
        )
    if made.chosen != ASYNCEP and crossover is not None and crossover > sequences.tokens:
        yield f"asyncep is faster than AllToAll (dp_ep) with {crossover} or more tokens per rank and step"


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
    run = f"moepass.offload_experts(model, {options}); {compiled}{remark}"
    if checkpoint is None:
        return run
    if stored is None:
        return f"model = moepass.load_pretrained({json.dumps(checkpoint)}, {options}); {compiled}{remark}"
    # load_pretrained cannot read quantised weights.
    dequantising = f"quantization_config=transformers.{_LOADERS[stored.name]}(dequantize=True)"
    return f"model = transformers.AutoModelForCausalLM.from_pretrained({json.dumps(checkpoint)}, {dequantising}); {run}"


def _remark(home: str, device: str) -> str:
    """Return a Python comment if `device` cannot compute from `home` yet, or else an empty text."""
    devices = home_named(home).devices
    if device in devices:
        return ""
    alternatives = " or ".join(
        f"--home {name}" for name, record in sorted(HOMES.items()) if device in record.devices and record.travel
    )
    return f"  # home {home} only works on {' and '.join(devices)} so far; plan for {device} with {alternatives}"
