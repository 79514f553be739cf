"""The planner: from the costs of a model's layers on a machine to the decisions by which it runs.

`explain`, placement at load time and the compiler all use it. `model_problem.py` poses the problem from sizes alone,
`graph_problem.py` from a captured graph; either may contain earlier decisions.

Pseudo-code
    residents and slots were decided before: use them
    no memory budget: stream everything
    no hardware profile: fill the budget with evenly spread resident layers and two slots
    else: search for the residents and slots with the least exposed time within the budget
    simulate the schedule in its steady state, if seconds are known
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT, STRUCTURAL, Decisions, DeviceMemory, FormRange
from moepass.passes.planner.phases import LayerPhase, RingSchedule, ring_schedule, streamed_phases
from moepass.passes.planner.schedule_search import BudgetError, search_schedule, spread_evenly
from moepass.passes.planner.simulate import ExecutionModel, Simulation, simulate_phases

DEFAULT_SLOTS = 2
MOST_SLOTS = 4
# Relative differences below this count as equal, such as those of step times with and without one resident bank.
ROUNDING = 1e-3

NO_PROFILE = "no hardware profile"
GIVEN = "given"
_PLAIN = ExecutionModel()


@dataclasses.dataclass(frozen=True)
class Profile:
    """Name of a machine's profile, and the sources of its figures."""

    name: str
    sources: str


@dataclasses.dataclass(frozen=True)
class PlanningProblem:
    """The input of the planner.

    Attributes:
        phases: one step, in order; `LayerPhase.number` is the layer of a bank. Without `profile` seconds are 0
        machine: how copies and computation act together, as far as known
        resting: bytes on the device that are independent of the decisions: dense weights, staging buffers, activations;
            None if unknown
        budget_bytes: memory that may be used on the device; with None there is no limit, and all banks are streamed
            except those of `resident`
        resident: positions of the phases whose banks are resident, if already decided
        slots: size of the ring, if already decided
        most_slots: the largest ring, if `slots` is not decided
        threshold: smallest number of tokens per rank and step at which transfers are hidden, if known
        unknown: why seconds are unknown, without `profile`
        memory_source: source of the numbers in `resting`
    """

    phases: tuple[LayerPhase, ...]
    home: str
    resting: DeviceMemory | None
    batch: int = 0
    sequence: int = 0
    machine: ExecutionModel = _PLAIN
    profile: Profile | None = None
    budget_bytes: float | None = None
    resident: tuple[int, ...] | None = None
    slots: int | None = None
    most_slots: int = MOST_SLOTS
    threshold: int | None = None
    unknown: str = NO_PROFILE
    memory_source: str = "predicted: formulas of weights, banks and activations; allocators round up"


@dataclasses.dataclass(frozen=True)
class MadePlan:
    """The decisions with the schedule and the simulation behind them. Without a profile there is no simulation."""

    decisions: Decisions
    schedule: RingSchedule
    simulation: Simulation | None
    memory: DeviceMemory | None


def make_plan(problem: PlanningProblem) -> MadePlan:
    """Choose the slots and resident layers that the problem leaves open, and predict the step's time and memory.

    Raises BudgetError if the given number of slots, or one slot if none is given, exceeds the budget. Raises ValueError
    if `most_slots` is below 1.
    """
    schedule, why = _decide(problem)
    simulation = None
    if problem.profile is not None:
        simulation = simulate_phases(problem.phases, schedule.slots, schedule.resident, problem.machine)
    memory = None if problem.resting is None else device_memory(problem.resting, schedule)
    return MadePlan(_decisions(problem, schedule, simulation, memory, why), schedule, simulation, memory)


def device_memory(resting: DeviceMemory, schedule: RingSchedule) -> DeviceMemory:
    """Return the bytes on one device with `schedule`; `resting` is independent of the schedule."""
    return dataclasses.replace(
        resting,
        resident_bytes=resting.resident_bytes + schedule.resident_bytes + schedule.shard_bytes,
        slot_bytes=resting.slot_bytes + schedule.ring_bytes,
    )


def _decide(problem: PlanningProblem) -> tuple[RingSchedule, dict[str, str]]:
    """Return the schedule, and how its resident layers and its number of slots were chosen."""
    phases = problem.phases
    if problem.resident is not None or problem.budget_bytes is None:
        slots = DEFAULT_SLOTS if problem.slots is None else problem.slots
        stay = GIVEN if problem.resident is not None else f"{STRUCTURAL}: no memory budget"
        why = {"resident_layers": stay, "slots": STRUCTURAL if problem.slots is None else GIVEN}
        return ring_schedule(phases, slots, problem.resident or ()), why
    available = int(problem.budget_bytes - (0.0 if problem.resting is None else problem.resting.peak_bytes))
    if problem.profile is None:
        resident, slots = _filled_evenly(phases, available, problem.slots, problem.machine.fills_ahead)
        source = f"{STRUCTURAL}: {problem.unknown}; as many layers stay as fit, spread evenly"
        why = {"resident_layers": source, "slots": GIVEN if problem.slots is not None else f"{STRUCTURAL}"}
        return ring_schedule(phases, slots, resident), why
    schedule = search_schedule(phases, available, problem.most_slots, problem.slots, problem.machine)
    if problem.slots is None:
        schedule = _with_second_slot(problem, schedule, available)
    searched = f"searched: the least exposed time within the budget, with profile {problem.profile.name}"
    return schedule, {"resident_layers": searched, "slots": GIVEN if problem.slots is not None else searched}


def _filled_evenly(
    phases: Sequence[LayerPhase], available: int, slots: int | None, fills_ahead: bool
) -> tuple[tuple[int, ...], int]:
    """Return evenly spread positions that stay, and the number of slots: `slots`, or two, or one if two do not fit.

    If slots fill across steps, a steady stream has no first layer, so every streamed bank gets equal computation before
    it to hide its transfer. Otherwise the first layers have no computation before them, and one of them stays.
    """
    banks = streamed_phases(phases)
    spreads = [spread_evenly(banks, number, fills_ahead) for number in range(len(banks) + 1)]
    for count in (DEFAULT_SLOTS, 1) if slots is None else (slots,):
        # Spread as many as fit evenly, then fill the memory that smaller banks leave.
        fitting = [spread for spread in spreads if ring_schedule(phases, count, spread).memory_bytes <= available]
        if not fitting:
            continue
        resident = fitting[-1]
        for position in banks:
            if (
                position not in resident
                and ring_schedule(phases, count, [*resident, position]).memory_bytes <= available
            ):
                resident.append(position)
        return tuple(sorted(resident)), min(count, len(banks) - len(resident))
    needed = min(ring_schedule(phases, slots or 1, spread).memory_bytes for spread in spreads)
    held = "one slot" if slots in (None, 1) else f"{slots} slots"
    raise BudgetError(available, f"resident banks, shards and {held} for the others", needed)


def _with_second_slot(problem: PlanningProblem, searched: RingSchedule, available: int) -> RingSchedule:
    """Return `searched`, or a schedule with a second slot in place of a resident bank if that costs no time.

    With one slot, only attention hides a transfer. The search assumes exact times, and a second slot makes errors in
    them less costly.
    """
    if searched.slots != 1 or problem.most_slots < 2 or len(searched.order) < 1:
        return searched
    # With shards on the device, one resident bank frees less than a slot needs.
    changed = next(
        (
            schedule
            for count in range(len(searched.resident), -1, -1)
            if (schedule := ring_schedule(problem.phases, 2, searched.resident[:count])).memory_bytes <= available
        ),
        searched,
    )
    before, after = (
        simulate_phases(problem.phases, schedule.slots, schedule.resident, problem.machine).step_seconds
        for schedule in (searched, changed)
    )
    return searched if after > before * (1 + ROUNDING) else changed


def _decisions(
    problem: PlanningProblem,
    schedule: RingSchedule,
    simulation: Simulation | None,
    memory: DeviceMemory | None,
    why: dict[str, str],
) -> Decisions:
    def layers(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(problem.phases[position].number for position in positions)

    if problem.profile is None:
        predicted = f"{STRUCTURAL}: {problem.unknown}"
    else:
        predicted = f"predicted: with profile {problem.profile.name} ({problem.profile.sources})"
    sources = {
        **why,
        "threshold_tokens": predicted
        if problem.threshold is not None
        else f"not known: {problem.unknown or 'it is predicted from the sizes of layers, which are not known'}",
        "step_seconds": predicted,
        "memory": "not known: a graph does not show what else is on the device"
        if memory is None
        else problem.memory_source,
    }
    return Decisions(
        home=problem.home,
        profile="" if problem.profile is None else problem.profile.name,
        batch=problem.batch,
        sequence=problem.sequence,
        forms=(FormRange(ASYNCEP if schedule.order else RESIDENT),),
        resident_layers=layers(schedule.resident),
        streamed_layers=layers(schedule.order),
        slots=schedule.slots,
        slot_bytes=schedule.slot_bytes,
        memory_budget_bytes=problem.budget_bytes,
        threshold_tokens=problem.threshold,
        step_seconds=None if simulation is None else simulation.step_seconds,
        compute_seconds=None if simulation is None else simulation.compute_seconds,
        exposed_seconds=None if simulation is None else simulation.exposed_seconds,
        memory=memory,
        sources=tuple(sorted(sources.items())),
    )
