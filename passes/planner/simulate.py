"""Simulation of a schedule in its steady state, without a machine.

A discrete-event simulation of three actors, as the executor and the ring have them. The host issues steps in order; the
compute stream runs segments in that order; each link copies one bank after the other, and a decoder decodes one after
the other: a bank is decoded while the next one is copied into the other encoded buffer. Runs are repeated until they
are periodic. Slots that a run no longer needs are filled for the next run, as in the real ring.

Pseudo-code
    until a step begins in the same state as an earlier one:
        for each graph of the step, for each of its steps:
            prefetch: the copy joins the queue of its link, unless the previous run has already started it
            decode: the decode joins the queue of the decoder, unless the previous run has already started it
            acquire: the compute stream waits for the copy, or the decode
            segment: the compute stream works, more slowly while a link is busy
            release: the slot is free; if this run no longer needs it, the next run's copy follows
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.timeline import Event, Timeline, timeline_of
from moepass.passes.planner.phases import LayerPhase, TimedStep, phase_steps, plan_steps
from moepass.passes.planner.simulation_engine import (
    Engine,
    ExecutionModel,
    SimulatedRun,
    fills_slot,
    lane_of,
    never_filled,
    period_of,
)

# Runs are nearly always periodic after two or three steps. If they are not, the mean of the last steps is used.
_MOST_STEPS = 48


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds for any schedule over this link and these slots, in seconds per step.

    Attributes:
        path_seconds: the longest dependency chain; if slots are filled ahead, all computation
        link_seconds: the busiest link's transfers, or all decodes
        slots_seconds: all stays in slots, each from the start of the copy or decode into it to its release, divided by
            the number of slots
    """

    path_seconds: float
    link_seconds: float
    slots_seconds: float

    @property
    def step_seconds(self) -> float:
        """The largest of the bounds."""
        return max(self.path_seconds, self.link_seconds, self.slots_seconds)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """One step in the steady state.

    Attributes:
        compute_seconds: seconds of the segments alone
        exposed_seconds: time in which the compute stream waits for a copy or a decode
        slowed_seconds: additional seconds of segments while copies run
        peak_slot_bytes: the peak bytes of banks in slots; the ring itself occupies slots times slot size
    """

    timeline: Timeline
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    slowed_seconds: float
    peak_slot_bytes: int
    bounds: Bounds


_PLAIN = ExecutionModel()


def simulate_phases(
    phases: Sequence[LayerPhase],
    slots: int,
    resident: Collection[int] = (),
    machine: ExecutionModel = _PLAIN,
) -> Simulation:
    """Simulate a model that repeats `phases`. Raises the errors of `phase_steps` and `simulate`."""
    return simulate([phase_steps(phases, slots, resident)], slots, machine)


def simulate_plan(
    plan: Plan,
    segment_seconds: Sequence[float],
    transfer_seconds: Mapping[int, float],
    machine: ExecutionModel = _PLAIN,
    decode_seconds: Mapping[int, float] | None = None,
) -> Simulation:
    """Simulate a model that is one graph with this plan. Raises the errors of `plan_steps` and `simulate`."""
    return simulate([plan_steps(plan, segment_seconds, transfer_seconds, decode_seconds)], plan.slots, machine)


def simulate(runs: Sequence[Sequence[TimedStep]], ring_slots: int = 0, machine: ExecutionModel = _PLAIN) -> Simulation:
    """Simulate a model whose step consists of `runs`, one for each of its graphs, over one ring.

    The ring has `ring_slots` slots, or as many as the largest run uses if that is more.

    Raises PlanError if an acquire would wait forever, and ValueError if seconds are negative or not finite.
    """
    for step in (step for run in runs for step in run):
        if not (math.isfinite(step.seconds) and step.seconds >= 0):
            raise ValueError(f"{step.op} {step.layer} takes {step.seconds} seconds; it must be a finite time from 0 on")
    engine = Engine([SimulatedRun(run) for run in runs], ring_slots, machine)
    boundaries = [engine.boundary()]
    period = 0
    while not period and len(boundaries) <= _MOST_STEPS:
        engine.step()
        boundaries.append(engine.boundary())
        period = period_of(boundaries)
    first, last = boundaries[-1 - (period or _MOST_STEPS // 2)], boundaries[-1]
    steps = period or _MOST_STEPS // 2
    return Simulation(
        timeline=_shown(engine.events, boundaries[-2].time, last.time),
        step_seconds=(last.time - first.time) / steps,
        compute_seconds=engine.compute_seconds,
        exposed_seconds=(last.waited - first.waited) / steps,
        slowed_seconds=(last.slowed - first.slowed) / steps,
        peak_slot_bytes=engine.peak_bytes,
        bounds=step_bounds(runs, engine.slots, machine),
    )


def step_bounds(runs: Sequence[Sequence[TimedStep]], slots: int, machine: ExecutionModel = _PLAIN) -> Bounds:
    """Return the bounds of a step of these runs, over a ring of `slots` slots."""
    issue = 0.0 if machine.host_runs_ahead else machine.issue_seconds
    links: dict[str, float] = {}
    path = occupied = 0.0
    for run in runs:
        held: dict[int, float] = {}
        compute = sum(step.seconds for step in run if step.op == "segment") + issue * len(run)
        longest, done, brought = compute, 0.0, dict[str, float]()
        fillings = {index: tuple(run[step] for step in steps) for index, *steps in _fillings(run)}
        for index, step in enumerate(run):
            done += issue
            if step.op == "segment":
                done += step.seconds
                held = {slot: seconds + step.seconds for slot, seconds in held.items()}
            elif step.op == "acquire":
                held[step.slot] = 0.0
                copy, *decodes = fillings[index]
                brought[copy.link] = brought.get(copy.link, 0.0) + copy.seconds
                decoding = sum(decode.seconds for decode in decodes)
                longest = max(longest, brought[copy.link] + decoding + compute - done)
            elif step.op == "release":
                occupied += held.pop(step.slot, 0.0)
            else:
                occupied += step.seconds if fills_slot(step) else 0.0
                lane = lane_of(step)
                links[lane] = links.get(lane, 0.0) + step.seconds
        path += compute if machine.fills_ahead else longest
    return Bounds(path, max(links.values(), default=0.0), occupied / slots if slots else 0.0)


def _fillings(run: Sequence[TimedStep]) -> Iterator[tuple[int, ...]]:
    """Yield every acquire with its prefetch, and with its decode if there is one, as positions.

    Raises PlanError if an acquire has no prefetch before it.
    """
    copied: dict[int, deque[int]] = defaultdict(deque)
    filling: dict[int, tuple[int, ...]] = {}
    for index, step in enumerate(run):
        if step.op == "prefetch" and step.is_encoded:
            copied[step.slot].append(index)
        elif step.op == "prefetch":
            filling[step.slot] = (index,)
        elif step.op == "decode":
            filling[step.slot] = (copied[step.slot].popleft(), index)
        elif step.op == "acquire":
            if step.slot not in filling:
                raise never_filled(step)
            yield index, *filling[step.slot]


def _shown(events: Sequence[tuple[str, str, str, float, float]], start: float, end: float) -> Timeline:
    """Return the events that began in [start, end), as one step that begins at 0."""
    return timeline_of(
        [
            Event(op, layer, stream, began - start, ended - start)
            for op, layer, stream, began, ended in events
            if start <= began < end
        ],
        source="derived",
    )


__all__ = ["Bounds", "ExecutionModel", "Simulation", "simulate", "simulate_phases", "simulate_plan", "step_bounds"]
