"""The planner: from what a model's layers cost on a machine to the decisions by which it runs.

`explain`, placement at load time and the compiler all come here. They differ in what they know: `model_problem.py`
poses the problem from sizes alone, `graph_problem.py` from a captured graph, and either may say what is decided
already.

Pseudo-code
    residents and slots were decided before: take them
    no memory budget: everything is streamed
    no hardware profile: fill the budget with layers that are spread evenly, beside two slots
    else: search for the residents and slots with the least exposed time within the budget
    simulate the schedule in its steady state, where seconds are known
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.passes.ir.decisions import ASYNCEP, RESIDENT, STRUCTURAL, Decisions, DeviceMemory, FormRange
from moepass.passes.planner.phases import LayerPhase, RingSchedule, ring_schedule, streamed_phases
from moepass.passes.planner.schedule_search import BudgetError, search_schedule, spread_evenly
from moepass.passes.planner.simulate import Machine, Simulation, simulate_phases

DEFAULT_SLOTS = 2
MOST_SLOTS = 4
# Relative differences below this count as equal. One resident bank less may cost the memory that its copy takes.
ROUNDING = 1e-3

NO_PROFILE = "no hardware profile"
GIVEN = "given"
_PLAIN = Machine()


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the profile of a machine is called, and where its figures come from."""

    name: str
    sources: str


@dataclasses.dataclass(frozen=True)
class PlanningProblem:
    """The input of the planner.

    phases        one step, in order; `LayerPhase.number` tells the layer of a bank. Without `profile` seconds are 0
    machine       how copies and computation act together, as far as that is known
    resting       bytes on the device whatever is decided: dense weights, staging buffers, activations; None: not known
    budget_bytes  that may be used on the device; None: no limit was given, so that nothing but `resident` stays
    resident      positions of phases that stay, where that is decided already
    slots         of the ring, where that is decided already; `most_slots` where it is not
    threshold     tokens per rank and step from which on transfers are hidden
    unknown       why seconds are not known, without `profile`
    memory_source where the numbers of `resting` come from
    """

    phases: tuple[LayerPhase, ...]
    home: str
    resting: DeviceMemory | None
    batch: int = 0
    sequence: int = 0
    machine: Machine = _PLAIN
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
    """The decisions, and what they were read off. `simulation` is None without a profile."""

    decisions: Decisions
    schedule: RingSchedule
    simulation: Simulation | None
    memory: DeviceMemory | None


def make_plan(problem: PlanningProblem) -> MadePlan:
    """Decide what is not decided yet, and predict the step.

    Raises BudgetError where not even one slot fits into the budget, or `problem.slots` where that is given. ValueError
    for `most_slots` below 1.
    """
    schedule, why = _decide(problem)
    simulation = None
    if problem.profile is not None:
        simulation = simulate_phases(problem.phases, schedule.slots, schedule.resident, problem.machine)
    memory = None if problem.resting is None else device_memory(problem.resting, schedule)
    return MadePlan(_decisions(problem, schedule, simulation, memory, why), schedule, simulation, memory)


def device_memory(resting: DeviceMemory, schedule: RingSchedule) -> DeviceMemory:
    """Bytes on one device by `schedule`, where `resting` is there whatever is decided."""
    return dataclasses.replace(
        resting,
        resident_bytes=resting.resident_bytes + schedule.resident_bytes + schedule.shard_bytes,
        slot_bytes=resting.slot_bytes + schedule.slots * schedule.slot_bytes,
    )


def _decide(problem: PlanningProblem) -> tuple[RingSchedule, dict[str, str]]:
    """The schedule, and where its residents and slots come from."""
    phases = problem.phases
    if problem.resident is not None or problem.budget_bytes is None:
        slots = DEFAULT_SLOTS if problem.slots is None else problem.slots
        stay = GIVEN if problem.resident is not None else f"{STRUCTURAL}: no memory budget"
        why = {"resident_layers": stay, "slots": STRUCTURAL if problem.slots is None else GIVEN}
        return ring_schedule(phases, slots, problem.resident or ()), why
    room = int(problem.budget_bytes - (0.0 if problem.resting is None else problem.resting.peak_bytes))
    if problem.profile is None:
        resident, slots = _filled_evenly(phases, room, problem.slots, problem.machine.fills_ahead)
        source = f"{STRUCTURAL}: {problem.unknown}; as many layers stay as fit, spread evenly"
        why = {"resident_layers": source, "slots": GIVEN if problem.slots is not None else f"{STRUCTURAL}"}
        return ring_schedule(phases, slots, resident), why
    found: RingSchedule = search_schedule(phases, room, problem.most_slots, problem.slots, problem.machine)
    if problem.slots is None:
        found = _with_second_slot(problem, found, room)
    searched = f"searched: the least exposed time within the budget, with profile {problem.profile.name}"
    return found, {"resident_layers": searched, "slots": GIVEN if problem.slots is not None else searched}


def _filled_evenly(
    phases: Sequence[LayerPhase], room: int, slots: int | None, fills_ahead: bool
) -> tuple[tuple[int, ...], int]:
    """Positions that stay, spread evenly, beside `slots` slots: two, or one where two do not fit.

    Where slots fill across steps, no layer is the first of a steady stream: what counts is that every streamed bank has
    computation before it to hide behind, as much as the others. Else the first layers have none, and one stays there.
    """
    banks = streamed_phases(phases)
    spreads = [spread_evenly(banks, number, fills_ahead) for number in range(len(banks) + 1)]
    for count in (DEFAULT_SLOTS, 1) if slots is None else (slots,):
        # The even spread for as many as fit; what a smaller bank leaves is filled up.
        fitting = [spread for spread in spreads if ring_schedule(phases, count, spread).memory_bytes <= room]
        if not fitting:
            continue
        resident = fitting[-1]
        for place in banks:
            if place not in resident and ring_schedule(phases, count, [*resident, place]).memory_bytes <= room:
                resident.append(place)
        return tuple(sorted(resident)), min(count, len(banks) - len(resident))
    needed = min(ring_schedule(phases, slots or 1, spread).memory_bytes for spread in spreads)
    held = "one slot" if slots in (None, 1) else f"{slots} slots"
    raise BudgetError(room, f"resident banks, shards and {held} for the others", needed)


def _with_second_slot(problem: PlanningProblem, found: RingSchedule, room: int) -> RingSchedule:
    """`found`; where it has one slot, a second one takes the place of a resident bank if that costs no time.

    Behind one slot only attention hides a transfer. What the search cannot know is how well its times are known.
    """
    if found.slots != 1 or problem.most_slots < 2 or len(found.order) < 1:
        return found
    # With shards on the device, a bank that leaves frees less than a slot takes.
    changed = next(
        (
            schedule
            for count in range(len(found.resident), -1, -1)
            if (schedule := ring_schedule(problem.phases, 2, found.resident[:count])).memory_bytes <= room
        ),
        found,
    )
    before, after = (
        simulate_phases(problem.phases, one.slots, one.resident, problem.machine).step_seconds
        for one in (found, changed)
    )
    return found if after > before * (1 + ROUNDING) else changed


def _decisions(
    problem: PlanningProblem,
    schedule: RingSchedule,
    simulation: Simulation | None,
    memory: DeviceMemory | None,
    why: dict[str, str],
) -> Decisions:
    def layers(places: Sequence[int]) -> tuple[int, ...]:
        return tuple(problem.phases[place].number for place in places)

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
        "memory": "not known: a graph does not tell what else is on the device"
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
