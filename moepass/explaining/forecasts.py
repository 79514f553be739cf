"""The forecasts in a report: over the homes to try, and of a quantised checkpoint in its own format."""

from __future__ import annotations

import dataclasses

from moepass.explaining.report_parts import HomeTried, StoredPart
from moepass.models.errors import InputError
from moepass.passes.ir.decisions import ASYNCEP
from moepass.passes.machine.times import peak_flops_per_s
from moepass.passes.planner.forecast import Forecast, forecast
from moepass.passes.planner.strategies import Setting, banks_bytes, homes_of

# A simpler home is preferred if it is slower by no more than this fraction.
_NO_MATTER = 0.01


def best_home(setting: Setting, home: str | None, most_slots: int) -> tuple[Forecast, list[HomeTried]]:
    """The forecast of the home with the fastest asyncep that fits, and all homes tried.

    If no home fits, the forecast of the one that needs the least memory.
    Raises InputError with the reason of every home if the machine can use none.
    """
    if home is not None:
        only = forecast(setting, home, most_slots=most_slots)
        return only, [_tried(only)]
    peak_flops_per_s(setting.hardware, setting.dtype)  # a dtype without a rate is no matter of the home
    made: list[Forecast] = []
    tried: list[HomeTried] = []
    for candidate in homes_of(setting):
        try:
            made.append(forecast(setting, candidate, most_slots=most_slots))
            tried.append(_tried(made[-1]))
        except InputError as error:
            # Other homes may do on this machine; the report says why this one does not.
            tried.append(HomeTried(candidate, None, None, False, str(error)))
    if not made:
        reasons = "; ".join(f"{one.home}: {one.note}" for one in tried)
        raise InputError(
            f"{setting.hardware.name} can use no home: {reasons}", name="hardware", value=setting.hardware.name
        )
    fitting = [one for one in made if one.cost(ASYNCEP).fits]
    if fitting:
        enough = (1 + _NO_MATTER) * min(one.cost(ASYNCEP).step_seconds for one in fitting)
        return next(one for one in fitting if one.cost(ASYNCEP).step_seconds <= enough), tried
    return min(made, key=lambda one: one.memory.peak_bytes), tried


def _tried(made: Forecast) -> HomeTried:
    cost = made.cost(ASYNCEP)
    if cost.fits:
        return HomeTried(made.home, cost.step_seconds, cost.memory_bytes, True, "")
    return HomeTried(made.home, None, cost.memory_bytes, False, _shortage(made))


def _shortage(made: Forecast) -> str:
    """The memory that asyncep lacks."""
    over = made.cost(ASYNCEP).memory_bytes - made.setting.budget_bytes
    if over <= 0 and made.host.available_bytes is not None:
        needed, available = made.host.needed_bytes / 1e9, made.host.available_bytes / 1e9
        return f"needs {needed:.1f} GB of host memory, and the machine has {available:.1f} GB"
    return f"needs {over / 1e9:.1f} GB more than the budget"


def why_nothing_fits(made: Forecast) -> str:
    """The reason, with numbers; empty if a strategy fits."""
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
    """None where the checkpoint of `setting`'s architecture is not quantised, or in a format of unknown sizes.

    `setting` is what moepass runs; `home` and `most_slots` as for `best_home`.
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
    others = [cost for cost in made.comparison if cost.strategy != ASYNCEP and cost.fits]
    fastest = min(others, key=lambda cost: cost.step_seconds) if others else None
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
    """The weights that the report's numbers assume if the checkpoint is quantised; empty if it is not. `unknown` says
    why the sizes of its format are not known."""
    if unknown:
        return f"{unknown}; all numbers are those of weights in {setting.dtype}, which moepass runs once dequantised"
    stored = setting.architecture.stored
    if stored is None or setting.stored is not None:
        return ""
    return (
        f"the checkpoint is in {stored.name}, which moepass does not run yet: it runs the weights dequantised to "
        f"{setting.dtype}, and all strategies are computed with these, but for the forecast in {stored.name}"
    )
