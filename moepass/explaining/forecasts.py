"""The forecasts in a report: for each home, and for a quantised checkpoint in its own format."""

from __future__ import annotations

import dataclasses

from moepass.explaining.report import HomeTried, StoredPart
from moepass.models.errors import InputError
from moepass.passes.ir.planner_decisions import ASYNCEP
from moepass.passes.machine.times import peak_flops_per_s
from moepass.passes.planner.forecast import Forecast, forecast
from moepass.passes.planner.strategies import Setting, banks_bytes, homes_of

# A simpler home is preferred if it is slower by no more than this fraction.
_NEGLIGIBLE = 0.01


def best_home(setting: Setting, home: str | None, most_slots: int) -> tuple[Forecast, list[HomeTried]]:
    """Return the forecast of the home with the fastest asyncep that fits, and all homes that were tried.

    If no home fits, the forecast is that of the home that needs the least memory.

    Raises:
        InputError: if the machine can use no home, with the reason for each.
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
        raise InputError(
            f"no home can be used on {setting.hardware.name}: {reasons}", name="hardware", value=setting.hardware.name
        )
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


def stored_part(setting: Setting, home: str | None, most_slots: int) -> StoredPart | None:
    """Return the forecast of a quantised checkpoint in its own format; None for another, or if its sizes are unknown.

    `setting` is what moepass runs now. For the other arguments, see `best_home`.
    """
    stored = setting.architecture.stored
    if stored is None:
        return None
    has_rate = stored.computes_in in setting.hardware.flops
    computes_in = stored.computes_in if has_rate else setting.architecture.dtype
    native = dataclasses.replace(setting, stored=stored, dtype=computes_in)
    experts = setting.architecture.typical_moe_layer.experts
    assert experts is not None
    (made, _), sizes = best_home(native, home, most_slots), native.bank(experts)
    asyncep = made.cost(ASYNCEP)
    alternatives = (cost for cost in made.comparison if cost.strategy != ASYNCEP and cost.fits)
    fastest = min(alternatives, key=lambda cost: cost.step_seconds, default=None)
    return StoredPart(
        format=stored.name,
        expert_bytes=banks_bytes(native),
        other_bytes=native.dense_bytes,
        bank_link_bytes=sizes.link_bytes,
        bank_slot_bytes=sizes.slot_bytes,
        computes_in=computes_in,
        runs_as=setting.dtype if setting.stored is None else stored.name,
        home=made.home,
        asyncep_step_seconds=asyncep.step_seconds if asyncep.fits else None,
        asyncep_memory_bytes=asyncep.memory_bytes,
        fastest_other=fastest.strategy if fastest else None,
        fastest_other_step_seconds=fastest.step_seconds if fastest else None,
    )


def stored_assumption(setting: Setting, unknown: str) -> str:
    """Return the weights that the figures assume for a quantised checkpoint, or an empty text for another.

    `unknown` is the reason why the sizes of its format are unknown, or empty.
    """
    if unknown:
        return f"{unknown}; all figures are for weights dequantised to {setting.dtype}, which moepass runs"
    stored = setting.architecture.stored
    if stored is None or setting.stored is not None:
        return ""
    return (
        f"the checkpoint is in {stored.name}, which moepass cannot run yet: all figures are for weights dequantised to "
        f"{setting.dtype}, except those of the forecast in {stored.name}"
    )
