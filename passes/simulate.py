"""Run a schedule without a machine: when would what happen, in the long run.

A discrete-event simulation of three actors, as the executor and the ring have them: the host issues steps in order, the
compute stream runs segments in that order, each link brings one bank after the other into slots. Runs follow each other
until they repeat themselves, and slots that a run has done with are filled for the next one, as the real ring does.

Pseudo-code
    until a step begins in a state that an earlier one began in:
        for each graph of the step, for each of its steps:
            prefetch: the copy joins the queue of its link, unless the run before has started it already
            acquire: the compute stream waits for the copy
            segment: the compute stream works, slower while a link is busy
            release: the slot is free; the next run's copy follows where this run needs the slot no more
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from moepass.passes.ir import Plan
from moepass.passes.protocol import PlanError
from moepass.passes.stages import Stage, TimedStep, plan_steps, stage_steps
from moepass.passes.timeline import COMPUTE, HOST, Event, Timeline, timeline_of

# Runs nearly always repeat themselves after two or three steps. Where they do not, the mean of the last ones will do.
_MOST_STEPS = 48


@dataclasses.dataclass(frozen=True)
class Machine:
    """How host, compute and copies act together.

    copy_slowdown     factor by which computation takes longer while a link is busy; 1 where it does not feel it
    issue_seconds     host time per step of the schedule
    host_runs_ahead   True on a GPU: the host issues a run's steps without waiting for them. On a CPU the host computes,
                      so that a copy starts when the host gets to its prefetch, and issuing takes compute time
    fills_ahead       False for the transport `collective`: no copy starts before the run that asked for it
    """

    copy_slowdown: float = 1.0
    issue_seconds: float = 0.0
    host_runs_ahead: bool = False
    fills_ahead: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.copy_slowdown) and self.copy_slowdown >= 1):
            raise ValueError(f"copy_slowdown is {self.copy_slowdown}; it must be a factor from 1 on")
        if not (math.isfinite(self.issue_seconds) and self.issue_seconds >= 0):
            raise ValueError(f"issue_seconds is {self.issue_seconds}; it must be a time from 0 on")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What no order of copies can beat, in seconds of one step.

    path   the longest chain of things that must follow each other; with slots filled ahead, all computation
    link   the busiest link's transfers
    slots  all stays in slots, each from the start of its copy to its release, over the number of slots
    """

    path_seconds: float
    link_seconds: float
    slots_seconds: float

    @property
    def step_seconds(self) -> float:
        return max(self.path_seconds, self.link_seconds, self.slots_seconds)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """One step in the steady state.

    compute_seconds    what the segments take by themselves
    exposed_seconds    time in which the compute stream waits for a copy
    slowed_seconds     what segments take longer because copies run beside them
    peak_slot_bytes    the most bytes of banks in slots at once; what the ring occupies is slots times slot size
    """

    timeline: Timeline
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    slowed_seconds: float
    peak_slot_bytes: int
    bounds: Bounds


_PLAIN = Machine()


def simulate_stages(
    stages: Sequence[Stage],
    slots: int,
    resident: Collection[int] = (),
    order: Sequence[int] | None = None,
    machine: Machine = _PLAIN,
) -> Simulation:
    """A model that runs `stages` again and again. Raises as `stage_steps` and `simulate`."""
    return simulate([stage_steps(stages, slots, resident, order)], slots, machine)


def simulate_plan(
    plan: Plan, segment_seconds: Sequence[float], transfer_seconds: Mapping[int, float], machine: Machine = _PLAIN
) -> Simulation:
    """A model that is one graph with this plan. Raises as `plan_steps` and `simulate`."""
    return simulate([plan_steps(plan, segment_seconds, transfer_seconds)], plan.slots, machine)


def simulate(runs: Sequence[Sequence[TimedStep]], ring_slots: int = 0, machine: Machine = _PLAIN) -> Simulation:
    """A model whose step consists of these runs, one for each of its graphs, over one ring.

    The ring has `ring_slots` slots, or as many as the largest run uses where that is more.

    Raises PlanError where an acquire waits for ever, ValueError where seconds are negative or not finite.
    """
    for step in (step for run in runs for step in run):
        if not (math.isfinite(step.seconds) and step.seconds >= 0):
            raise ValueError(f"{step.op} {step.layer} takes {step.seconds} seconds; it must be a time from 0 on")
    engine = _Engine([_Run(run) for run in runs], ring_slots, machine)
    borders = [engine.border()]
    period = 0
    while not period and len(borders) <= _MOST_STEPS:
        engine.step()
        borders.append(engine.border())
        period = _period(borders)
    first, last = borders[-1 - (period or _MOST_STEPS // 2)], borders[-1]
    steps = period or _MOST_STEPS // 2
    return Simulation(
        timeline=_shown(engine.events, borders[-2].time, last.time),
        step_seconds=(last.time - first.time) / steps,
        compute_seconds=engine.compute_seconds,
        exposed_seconds=(last.waited - first.waited) / steps,
        slowed_seconds=(last.slowed - first.slowed) / steps,
        peak_slot_bytes=engine.peak_bytes,
        bounds=step_bounds(runs, engine.slots, machine),
    )


def step_bounds(runs: Sequence[Sequence[TimedStep]], slots: int, machine: Machine = _PLAIN) -> Bounds:
    """The bounds of a step of these runs, over a ring of `slots` slots."""
    issue = 0.0 if machine.host_runs_ahead else machine.issue_seconds
    links: dict[str, float] = {}
    path = occupied = 0.0
    for run in runs:
        held: dict[int, float] = {}
        compute = sum(step.seconds for step in run if step.op == "segment") + issue * len(run)
        longest, done, brought = compute, 0.0, dict[str, float]()
        transfers = {index: run[prefetched] for index, prefetched in _pairs(run)}
        for index, step in enumerate(run):
            done += issue
            if step.op == "segment":
                done += step.seconds
                held = {slot: seconds + step.seconds for slot, seconds in held.items()}
            elif step.op == "acquire":
                held[step.slot] = 0.0
                copy = transfers[index]
                brought[copy.link] = brought.get(copy.link, 0.0) + copy.seconds
                longest = max(longest, brought[copy.link] + compute - done)
            elif step.op == "release":
                occupied += held.pop(step.slot, 0.0)
            else:
                occupied += step.seconds
                links[step.link] = links.get(step.link, 0.0) + step.seconds
        path += compute if machine.fills_ahead else longest
    return Bounds(path, max(links.values(), default=0.0), occupied / slots if slots else 0.0)


def _pairs(run: Sequence[TimedStep]) -> Iterator[tuple[int, int]]:
    """Every acquire with its prefetch, as positions. Raises PlanError where an acquire has none before it."""
    filling: dict[int, int] = {}
    for index, step in enumerate(run):
        if step.op == "prefetch":
            filling[step.slot] = index
        elif step.op == "acquire":
            if step.slot not in filling:
                raise PlanError(_never_filled(step))
            yield index, filling[step.slot]


def _never_filled(step: TimedStep) -> str:
    return f"{step.op} of {step.layer} in slot {step.slot} waits for ever: no prefetch is before it"


class _Run:
    """The steps of one graph. `beginning` are the prefetches into fresh slots, `last` the last release of each slot."""

    def __init__(self, steps: Sequence[TimedStep]) -> None:
        self.steps = steps
        self.beginning: dict[int, TimedStep] = {}
        released: dict[int, int] = {}
        for index, step in enumerate(steps):
            if step.op == "release":
                released[step.slot] = index
            elif step.op == "prefetch" and step.slot not in released:
                self.beginning.setdefault(step.slot, step)
        self.last = set(released.values())
        self.slots = len(self.beginning)
        if sorted(self.beginning) != list(range(self.slots)):
            raise ValueError(f"a run fills slots {sorted(self.beginning)}; they must be numbered from 0 on")


class _Release:
    """The event that a release records."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class _Copy:
    __slots__ = ("after", "done", "end", "not_before", "started", "step")

    def __init__(self, step: TimedStep, after: _Release | None, not_before: float) -> None:
        self.step, self.after, self.not_before = step, after, not_before
        self.started = self.end = math.inf
        self.done = False


@dataclasses.dataclass(frozen=True)
class _Border:
    """Between two steps: the clock, the totals so far, and what is still to come on each link."""

    time: float
    waited: float
    slowed: float
    backlog: tuple[tuple[str, float], ...]


def _period(borders: Sequence[_Border]) -> int:
    """After how many steps the last border repeats an earlier one; 0 where it repeats none of the last few."""
    last = borders[-1]
    for period in range(1, min(len(borders), 9)):
        earlier = borders[-1 - period]
        tolerance = 1e-9 * (last.time - earlier.time)
        if [name for name, _ in last.backlog] == [name for name, _ in earlier.backlog] and all(
            abs(now - then) <= tolerance for (_, now), (_, then) in zip(last.backlog, earlier.backlog, strict=True)
        ):
            return period
    return 0


class _Engine:
    def __init__(self, runs: Sequence[_Run], ring_slots: int, machine: Machine) -> None:
        self.runs, self.machine = runs, machine
        self.slots = max([ring_slots, *(run.slots for run in runs)])
        self.compute_seconds = sum(step.seconds for run in runs for step in run.steps if step.op == "segment")
        self.events: list[tuple[str, str, str, float, float]] = []
        self.now = self.waited = self.slowed = 0.0
        self.peak_bytes = 0
        self._bytes = 0
        self._links: dict[str, deque[_Copy]] = {}
        self._free = list(range(self.slots))
        self._freed: dict[int, _Release] = {}
        self._ahead: dict[int, _Copy] = {}

    def border(self) -> _Border:
        backlog = sorted((f"{copy.step.layer} is there", 0.0) for copy in self._ahead.values() if copy.done)
        for name, queue in self._links.items():
            for copy in queue:
                begun = copy.started <= self.now
                backlog.append((f"{name}: {copy.step.layer}", copy.end - self.now if begun else copy.step.seconds))
        return _Border(self.now, self.waited, self.slowed, tuple(backlog))

    def step(self) -> None:
        for number, run in enumerate(self.runs):
            self._run(run, self.runs[(number + 1) % len(self.runs)], f"graph {number}")

    def _run(self, run: _Run, following: _Run, name: str) -> None:
        begun = self.now
        self._run_state(run)
        machine = self.machine
        if machine.host_runs_ahead:
            issued = []
            for index, step in enumerate(run.steps):
                issued.append(begun + (index + 1) * machine.issue_seconds)
                self._issue(run, following, index, step, issued[-1])
            for index, step in enumerate(run.steps):
                self._idle_until(issued[index])
                self._execute(index, step)
        else:
            for index, step in enumerate(run.steps):
                self._work(machine.issue_seconds)
                self._issue(run, following, index, step, self.now)
                self._execute(index, step)
        self.events.append(("run", name, HOST, begun, self.now))

    def _run_state(self, run: _Run) -> None:
        self._buffer_of = self._free
        self._free = self._buffer_of[run.slots :]
        self._in_slot: dict[int, _Copy] = {}
        self._fresh = run.slots
        self._copy_of: dict[int, _Copy] = {}
        self._release_at: dict[int, tuple[_Release, _Copy]] = {}
        self._released: dict[int, _Release] = {}

    def _issue(self, run: _Run, following: _Run, index: int, step: TimedStep, time: float) -> None:
        """What the host does at a step: copies join their queues, events get their places."""
        if step.op == "segment":
            return
        if step.op != "prefetch" and step.slot not in self._in_slot:
            raise PlanError(_never_filled(step))
        buffer = self._buffer_of[step.slot]
        if step.op == "prefetch":
            after = self._released.get(step.slot)
            if after is not None:
                copy = self._enqueue(step, after, time)
            else:
                ahead = self._ahead.pop(buffer, None)
                copy = ahead if ahead is not None else self._enqueue(step, self._freed.get(buffer), time)
                self._fresh -= 1
                if not self._fresh:
                    for position, free in enumerate(self._free):
                        self._fill_ahead(following, position, free, time)
            self._in_slot[step.slot] = copy
        elif step.op == "acquire":
            self._copy_of[index] = self._in_slot[step.slot]
        else:
            released = _Release()
            self._released[step.slot] = self._freed[buffer] = released
            self._release_at[index] = (released, self._in_slot[step.slot])
            if index in run.last:
                self._free.append(buffer)
                self._fill_ahead(following, len(self._free) - 1, buffer, time)

    def _fill_ahead(self, following: _Run, slot: int, buffer: int, time: float) -> None:
        step = following.beginning.get(slot)
        if self.machine.fills_ahead and step is not None and buffer not in self._ahead:
            self._ahead[buffer] = self._enqueue(step, self._freed.get(buffer), time)

    def _enqueue(self, step: TimedStep, after: _Release | None, time: float) -> _Copy:
        copy = _Copy(step, after, time)
        self._links.setdefault(step.link, deque()).append(copy)
        return copy

    def _execute(self, index: int, step: TimedStep) -> None:
        """What the compute stream does at a step."""
        if step.op == "segment":
            begun = self.now
            self._work(step.seconds)
            self.events.append(("segment", step.layer, COMPUTE, begun, self.now))
        elif step.op == "acquire":
            begun = self.now
            copy = self._copy_of[index]
            while not copy.done:
                self._advance(math.inf)
                if self.now == math.inf:
                    raise PlanError(
                        f"acquire of {step.layer} in slot {step.slot} waits for ever: its copy waits for a release "
                        "that comes later"
                    )
            if self.now > begun:
                self.waited += self.now - begun
                self.events.append(("wait", step.layer, COMPUTE, begun, self.now))
        elif step.op == "release":
            released, copy = self._release_at[index]
            released.done = True
            self._bytes -= copy.step.nbytes

    def _idle_until(self, time: float) -> None:
        while self.now < time:
            self._advance(time)

    def _work(self, seconds: float) -> None:
        while seconds > 0:
            begun = self.now
            factor = self.machine.copy_slowdown if self._start_copies() else 1.0
            end = begun + seconds * factor
            self._advance(end)
            self.slowed += (self.now - begun) * (1 - 1 / factor)
            if self.now >= end:
                return
            seconds -= (self.now - begun) / factor

    def _advance(self, limit: float) -> None:
        """Move the clock to `limit`, or to where something changes on a link if that comes first."""
        self._start_copies()
        change = limit
        for queue in self._links.values():
            if queue:
                head = queue[0]
                if head.started <= self.now:
                    change = min(change, head.end)
                elif head.after is None or head.after.done:
                    change = min(change, head.not_before)
        self.now = change
        for queue in self._links.values():
            if queue and queue[0].end <= change:
                queue.popleft().done = True

    def _start_copies(self) -> bool:
        """Start what may start now; True where a link is busy."""
        busy = False
        for name, queue in self._links.items():
            if not queue:
                continue
            head = queue[0]
            if head.started > self.now and head.not_before <= self.now and (head.after is None or head.after.done):
                head.started, head.end = self.now, self.now + head.step.seconds
                self.events.append(("copy", head.step.layer, name, head.started, head.end))
                self._bytes += head.step.nbytes
                self.peak_bytes = max(self.peak_bytes, self._bytes)
            busy = busy or head.started <= self.now
        return busy


def _shown(events: Sequence[tuple[str, str, str, float, float]], start: float, end: float) -> Timeline:
    """What began in [start, end), which is shown as one step that begins at 0."""
    return timeline_of(
        [
            Event(op, layer, stream, began - start, ended - start)
            for op, layer, stream, began, ended in events
            if start <= began < end
        ],
        source="derived",
    )
