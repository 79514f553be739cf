"""The fastest strategy that fits, the next one, and a sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence

from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT
from moepass.passes.planner.simulate import Simulation
from moepass.passes.planner.strategies import StrategyCost

# Preference among equally fast strategies: resident moves nothing, and asyncep needs no rendezvous.
_PREFERRED = {RESIDENT: 0, ASYNCEP: 1}
# A smaller fraction of waiting is reported as none.
_NOTHING = 0.0005
# [Empirical] How far a predicted step may be off: benchmarks/prediction.py. A smaller gain is a tie.
MODEL_ERROR = 0.10


def ranking(comparison: Sequence[StrategyCost], ranks: int) -> tuple[str, str | None]:
    """Return the fastest strategy that fits, and the next one.

    If nothing fits, returns the one with the least memory, and None. On a single device only asyncep and resident
    count, because all other strategies equal the resident one.
    """
    candidates = [cost for cost in comparison if ranks > 1 or cost.strategy in _PREFERRED]
    fitting = sorted(
        (cost for cost in candidates if cost.fits),
        key=lambda cost: (round(cost.step_seconds, 9), _PREFERRED.get(cost.strategy, len(_PREFERRED))),
    )
    if not fitting:
        return min(candidates, key=lambda cost: cost.memory_bytes).strategy, None
    return fitting[0].strategy, fitting[1].strategy if len(fitting) > 1 else None


def reason(
    comparison: Sequence[StrategyCost], chosen: str, runner_up: str | None, simulation: Simulation | None
) -> str:
    """Return why `chosen` was chosen. `simulation` is a simulation of asyncep; None if asyncep does not fit."""
    costs = {cost.strategy: cost for cost in comparison}
    if not costs[chosen].fits:
        needed = f"{costs[chosen].memory_bytes / 1e9:.1f} GB per device"
        return f"no strategy fits the memory budget; {chosen} needs the least memory, {needed}"
    gain = ""
    if runner_up is not None:
        ratio = costs[runner_up].step_seconds / costs[chosen].step_seconds
        if ratio >= 1 + MODEL_ERROR:
            gain = f", {ratio:.2f} times as fast as {runner_up}, the next strategy that fits"
        else:
            gain = (
                f"; a tie with {runner_up}, the next strategy that fits: predicted {ratio:.2f} times as fast, and "
                f"predictions are up to {MODEL_ERROR:.0%} off"
            )
    if chosen == RESIDENT:
        return f"all experts fit on every device, so nothing moves{gain}"
    waits = 1.0 if simulation is None else simulation.exposed_seconds / simulation.step_seconds
    if chosen == ASYNCEP:
        share = (
            "computation hides all transfers" if waits < _NOTHING else f"it waits {waits:.1%} of the step for experts"
        )
        return f"{share}, and no rank waits for another{gain}"
    if simulation is None:
        instead = "asyncep does not fit"
    elif waits < _NOTHING:
        instead = "asyncep would wait for nothing, but would still be slower"
    else:
        instead = f"asyncep would wait {waits:.0%} of its time for experts at this number of tokens"
    return f"{instead}{gain}"
