"""The actors of a simulated schedule: a host, a compute stream, and links with queues of copies.

`moepass.passes.planner.simulate` describes the simulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.timeline import COMPUTE, HOST
from moepass.passes.planner.phases import TimedStep


@dataclasses.dataclass(frozen=True)
class ExecutionModel:
    """The interaction of host, computation and copies.

    Attributes:
        copy_slowdown: factor by which computation takes longer while a link is busy; 1 if copies cost nothing
        issue_seconds: host time per step of the schedule
        host_runs_ahead: True on a GPU: the host issues a run's steps without waiting for them. On a CPU the host
            computes, so a copy starts when the host reaches its prefetch, and issuing takes compute time
        fills_ahead: False for transport `collective`: no copy starts before the run that requested it
    """

    copy_slowdown: float = 1.0
    issue_seconds: float = 0.0
    host_runs_ahead: bool = False
    fills_ahead: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.copy_slowdown) and self.copy_slowdown >= 1):
            raise ValueError(f"copy_slowdown is {self.copy_slowdown}; it must be a finite factor from 1 on")
        if not (math.isfinite(self.issue_seconds) and self.issue_seconds >= 0):
            raise ValueError(f"issue_seconds is {self.issue_seconds}; it must be a finite time from 0 on")


def never_filled(step: TimedStep) -> PlanError:
    """Return the error of a step whose slot has no prefetch before it."""
    text = f"{step.op} of {step.layer} in slot {step.slot} waits forever: there is no prefetch before it"
    return PlanError(text, name=step.layer, value=step.slot)


class SimulatedRun:
    """The steps of one graph.

    Attributes:
        beginning: prefetches into fresh slots, by slot
        last: positions of the last release of each slot
    """

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


class _ReleaseEvent:
    """The event that a release records."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class _Copy:
    __slots__ = ("after", "done", "end", "not_before", "started", "step")

    def __init__(self, step: TimedStep, after: _ReleaseEvent | None, not_before: float) -> None:
        self.step, self.after, self.not_before = step, after, not_before
        self.started = self.end = math.inf
        self.done = False


@dataclasses.dataclass(frozen=True)
class StepBoundary:
    """The state between two steps: the clock, the totals so far, and the remaining copies of each link."""

    time: float
    waited: float
    slowed: float
    backlog: tuple[tuple[str, float], ...]


def period_of(boundaries: Sequence[StepBoundary]) -> int:
    """Return the number of steps after which the boundaries repeat, 0 if none of the last eight equals the last one."""
    last = boundaries[-1]
    for period in range(1, min(len(boundaries), 9)):
        earlier = boundaries[-1 - period]
        tolerance = 1e-9 * (last.time - earlier.time)
        if [name for name, _ in last.backlog] == [name for name, _ in earlier.backlog] and all(
            abs(now - then) <= tolerance for (_, now), (_, then) in zip(last.backlog, earlier.backlog, strict=True)
        ):
            return period
    return 0


class Engine:
    """The simulation of runs, one after the other, over one ring."""

    def __init__(self, runs: Sequence[SimulatedRun], ring_slots: int, machine: ExecutionModel) -> None:
        self.runs, self.machine = runs, machine
        self.slots = max([ring_slots, *(run.slots for run in runs)])
        self.compute_seconds = sum(step.seconds for run in runs for step in run.steps if step.op == "segment")
        self.events: list[tuple[str, str, str, float, float]] = []
        self.now = self.waited = self.slowed = 0.0
        self.peak_bytes = 0
        self._bytes = 0
        self._links: dict[str, deque[_Copy]] = {}
        self._free = list(range(self.slots))
        self._freed: dict[int, _ReleaseEvent] = {}
        self._ahead: dict[int, _Copy] = {}

    def boundary(self) -> StepBoundary:
        """Return the state between the last step and the next."""
        backlog = sorted((f"{copy.step.layer} is there", 0.0) for copy in self._ahead.values() if copy.done)
        for name, queue in self._links.items():
            for copy in queue:
                begun = copy.started <= self.now
                backlog.append((f"{name}: {copy.step.layer}", copy.end - self.now if begun else copy.step.seconds))
        return StepBoundary(self.now, self.waited, self.slowed, tuple(backlog))

    def step(self) -> None:
        """Simulate one step: every run once."""
        for number, run in enumerate(self.runs):
            self._run(run, self.runs[(number + 1) % len(self.runs)], f"graph {number}")

    def _run(self, run: SimulatedRun, following: SimulatedRun, name: str) -> None:
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

    def _run_state(self, run: SimulatedRun) -> None:
        self._buffer_of = self._free
        self._free = self._buffer_of[run.slots :]
        self._in_slot: dict[int, _Copy] = {}
        self._fresh = run.slots
        self._copy_of: dict[int, _Copy] = {}
        self._release_at: dict[int, tuple[_ReleaseEvent, _Copy]] = {}
        self._released: dict[int, _ReleaseEvent] = {}

    def _issue(self, run: SimulatedRun, following: SimulatedRun, index: int, step: TimedStep, time: float) -> None:
        """Issue a step on the host: copies join their queues, and releases record their events."""
        if step.op == "segment":
            return
        if step.op != "prefetch" and step.slot not in self._in_slot:
            raise never_filled(step)
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
            released = _ReleaseEvent()
            self._released[step.slot] = self._freed[buffer] = released
            self._release_at[index] = (released, self._in_slot[step.slot])
            if index in run.last:
                self._free.append(buffer)
                self._fill_ahead(following, len(self._free) - 1, buffer, time)

    def _fill_ahead(self, following: SimulatedRun, slot: int, buffer: int, time: float) -> None:
        step = following.beginning.get(slot)
        if self.machine.fills_ahead and step is not None and buffer not in self._ahead:
            self._ahead[buffer] = self._enqueue(step, self._freed.get(buffer), time)

    def _enqueue(self, step: TimedStep, after: _ReleaseEvent | None, time: float) -> _Copy:
        copy = _Copy(step, after, time)
        self._links.setdefault(step.link, deque()).append(copy)
        return copy

    def _execute(self, index: int, step: TimedStep) -> None:
        """Execute a step on the compute stream."""
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
                        f"acquire of {step.layer} in slot {step.slot} waits forever: its copy waits for a release "
                        "that comes later",
                        name=step.layer,
                        value=step.slot,
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
        """Move the clock to `limit`, or to the next change on a link if that comes first."""
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
        """Start the copies that can start now, and return whether a link is busy."""
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
