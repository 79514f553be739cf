"""The forecasts in a report, for each home and for a quantised checkpoint in its own format, and their consequences.

These are advice, sentences with the number that a change leads to, and the Python code that runs the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

from moepass.explaining.report_parts import HomeTried, SchedulePart, StoredPart, StrategyPart
from moepass.models.errors import InputError
from moepass.models.homes import HOMES, home_named
from moepass.models.sizes.weight_formats import packed_format
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT
from moepass.passes.machine.hardware import with_ranks
from moepass.passes.machine.layer_times import sequences_of
from moepass.passes.machine.times import peak_flops_per_s
from moepass.passes.planner.forecast import Forecast, forecast
from moepass.passes.planner.host_memory import host_memory
from moepass.passes.planner.model_problem import least_memory_bytes
from moepass.passes.planner.strategies import Setting, banks_bytes, homes_of

# A simpler home is preferred if it is slower by no more than this fraction.
_NEGLIGIBLE = 0.01
_MOST_RANKS = 64
# The share of the step below which waiting is not worth mentioning.
_WORTH_SAYING = 0.01
# With more layers, the code refers to the report's list of layers.
_MOST_LAYERS_SHOWN = 12


def best_home(setting: Setting, home: str | None, most_slots: int) -> tuple[Forecast, list[HomeTried]]:
    """Return the forecast of the home with the fastest asyncep that fits, and all homes that were tried.

    If no home fits, the forecast is for the home that needs the least memory. Raises InputError if the machine can use
    no home, with the reason for each.
    """
    if home is not None:
        only = forecast(setting, home, most_slots=most_slots)
        return only, [_tried(only)]
    peak_flops_per_s(setting.hardware, setting.dtype)  # raises for a dtype without a rate, which no home can run
    made: list[Forecast] = []
    tried: list[HomeTried] = []
    for candidate in homes_of(setting):
        try:
            made.append(forecast(setting, candidate, most_slots=most_slots))
            tried.append(_tried(made[-1]))
        except InputError as error:
            # The machine may have the links of other homes; the report has the reason for this one.
            tried.append(HomeTried(candidate, None, None, False, str(error)))
    if not made:
        reasons = "; ".join(f"{attempt.home}: {attempt.note}" for attempt in tried)
        text = f"no home can be used on {setting.hardware.name}: {reasons}"
        raise InputError(text, name="hardware", value=setting.hardware.name)
    fitting = [(candidate, candidate.cost(ASYNCEP).step_seconds) for candidate in made if candidate.cost(ASYNCEP).fits]
    if fitting:
        most_seconds = (1 + _NEGLIGIBLE) * min(seconds for _, seconds in fitting)
        return next(candidate for candidate, seconds in fitting if seconds <= most_seconds), tried
    return min(made, key=lambda candidate: candidate.memory.peak_bytes), tried


def _tried(made: Forecast) -> HomeTried:
    cost = made.cost(ASYNCEP)
    if cost.fits:
        return HomeTried(made.home, cost.step_seconds, cost.memory_bytes, True, "")
    return HomeTried(made.home, None, cost.memory_bytes, False, _shortage(made))


def _shortage(made: Forecast) -> str:
    """Return the memory that asyncep lacks, as the end of a sentence."""
    over = made.cost(ASYNCEP).memory_bytes - made.setting.budget_bytes
    if over <= 0 and made.host.available_bytes is not None:
        needed, available = made.host.needed_bytes / 1e9, made.host.available_bytes / 1e9
        return f"needs {needed:.1f} GB of host memory, but the machine has {available:.1f} GB"
    return f"needs {over / 1e9:.1f} GB more than the budget"


def why_nothing_fits(made: Forecast) -> str:
    """Return the reason with its figures, or an empty text if a strategy fits."""
    smallest, budget = made.cost(made.chosen), made.setting.budget_bytes
    if smallest.fits:
        return ""
    if smallest.memory_bytes <= budget:  # host memory is short
        return f"no strategy fits: {smallest.strategy} {_shortage(made)}"
    return (
        f"no strategy fits: the smallest needs {smallest.memory_bytes / 1e9:.1f} GB per device, the budget is "
        f"{budget / 1e9:.1f} GB"
    )


def stored_part(made: Forecast, home: str | None, most_slots: int) -> StoredPart | None:
    """Return the sizes of a quantised checkpoint, and the forecast if kernels computed in its own format.

    Returns None if the checkpoint of `made`, the forecast of what moepass runs, is not quantised, or if its sizes are
    unknown. For the other arguments, see `best_home`.
    """
    setting = made.setting
    stored = setting.architecture.stored
    if stored is None:
        return None
    has_rate = stored.computes_in in setting.hardware.flops
    computes_in = stored.computes_in if has_rate else setting.architecture.dtype
    native = dataclasses.replace(setting, stored=stored, dtype=computes_in)
    experts = setting.architecture.typical_moe_layer.experts
    assert experts is not None
    (forecast_of_native, _), sizes = best_home(native, home, most_slots), native.bank(experts)
    asyncep = forecast_of_native.cost(ASYNCEP)
    alternatives = (cost for cost in forecast_of_native.comparison if cost.strategy != ASYNCEP and cost.fits)
    fastest = min(alternatives, key=lambda cost: cost.step_seconds, default=None)
    decoded = forecast(dataclasses.replace(setting, stored=None), made.home)
    return StoredPart(
        format=stored.name,
        expert_bytes=banks_bytes(native),
        other_bytes=native.dense_bytes,
        bank_link_bytes=sizes.link_bytes,
        bank_slot_bytes=sizes.slot_bytes,
        computes_in=computes_in,
        runs_as=setting.dtype,
        decoded_tokens_per_rank=decoded.saturation.tokens,
        home=forecast_of_native.home,
        asyncep_step_seconds=asyncep.step_seconds if asyncep.fits else None,
        asyncep_memory_bytes=asyncep.memory_bytes,
        fastest_other=fastest.strategy if fastest else None,
        fastest_other_step_seconds=fastest.step_seconds if fastest else None,
    )


def packed_tokens(made: Forecast) -> int | None:
    """Return the saturation threshold if the experts were packed without loss; None if packing would not change it."""
    packed = packed_format(made.setting.dtype) if made.setting.architecture.stored is None else None
    if packed is None or not made.fill_seconds:
        return None
    return forecast(dataclasses.replace(made.setting, stored=packed), made.home).saturation.tokens


def stored_assumption(setting: Setting, unknown: str) -> str:
    """Return what the figures assume of a quantised checkpoint; empty for any other model.

    `unknown` is the reason why the sizes of its format are unknown, or empty.
    """
    if unknown:
        return f"{unknown}; all figures are for weights dequantised to {setting.dtype}"
    stored = setting.stored
    if stored is None or stored.name == setting.dtype:
        return ""
    decoding = "as measured" if setting.hardware.decode else "at the rate of the memory, as one kernel could do it"
    return f"experts rest and travel in {stored.name}, and are decoded to {setting.dtype} into the slot, {decoding}"


# ---- Advice ----------------------------------------------------------------------------------------------------------


def advice(made: Forecast, crossover: int | None, refusals: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences of advice, the most useful first. An empty result means that nothing can be improved.

    `crossover` is the smallest number of tokens per rank with which asyncep beats AllToAll, or None.
    """
    if not made.cost(ASYNCEP).fits and made.chosen != RESIDENT:
        nothing = "none of the changes that were tried makes asyncep fit: other homes, fewer tokens, fp8, more ranks"
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
    for home in homes_of(setting):
        with contextlib.suppress(InputError):  # the machine may lack the link of a home
            least = least_memory_bytes(setting, home)
            if least <= setting.budget_bytes and host_memory(setting, home, least).fits is not False:
                return home
    return None


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
) -> str:
    """Return Python code to run, or the reason why there is no such code.

    `checkpoint` is the folder of a checkpoint, or None for any other model. `shortage` is the reason why no strategy
    fits, or empty.
    """
    if dtype == "fp8":
        return (
            "moepass computes only experts in fp8 (experts_compute='fp8'), not attention and dense layers: use --dtype "
            "bf16 for a plan that it can run"
        )
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
    if checkpoint is None:
        return f"moepass.offload_experts(model, {options}); {compiled}{remark}"
    return f"model = moepass.load_pretrained({json.dumps(checkpoint)}, {options}); {compiled}{remark}"


def _remark(home: str, device: str) -> str:
    """Return a Python comment if `device` cannot compute from `home` yet, or else an empty text."""
    devices = home_named(home).devices
    if device in devices:
        return ""
    alternatives = " or ".join(
        f"--home {name}" for name, record in sorted(HOMES.items()) if device in record.devices and record.travel
    )
    return f"  # home {home} only works on {' and '.join(devices)} so far; plan for {device} with {alternatives}"
