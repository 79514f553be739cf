"""The actors of a simulated schedule: a host, a compute stream, and lanes with queues: links and a decoder.

`moepass.passes.planner.simulate` describes the simulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Sequence

from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.timeline import COMPUTE, DECODE, HOST
from moepass.passes.planner.phases import TimedStep


@dataclasses.dataclass(frozen=True)
class ExecutionModel:
    """The interaction of host, computation and copies.

    Attributes:
        copy_slowdown: factor by which computation takes longer while a lane is busy; 1 if copies cost nothing
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


def fills_slot(step: TimedStep) -> bool:
    """Return whether a prefetch or a decode writes into the slot."""
    return step.op == "decode" or not step.is_encoded


def lane_of(step: TimedStep) -> str:
    """Return the link of a prefetch, or the decoder of a decode."""
    return DECODE if step.op == "decode" else step.link


class SimulatedRun:
    """The steps of one graph.

    Attributes:
        beginning: prefetches into fresh slots, each with its decode if the bank is encoded, by slot
        last: positions of the last release of each slot
    """

    def __init__(self, steps: Sequence[TimedStep]) -> None:
        self.steps = steps
        self.beginning: dict[int, tuple[TimedStep, ...]] = {}
        released: dict[int, int] = {}
        for index, step in enumerate(steps):
            first = self.beginning.get(step.slot)
            if step.op == "release":
                released[step.slot] = index
            elif step.op == "prefetch" and first is None:
                self.beginning[step.slot] = (step,)
            elif step.op == "decode" and first is not None and len(first) == 1 and first[0].is_encoded:
                self.beginning[step.slot] = (*first, step)
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
    """A copy, or a decode, which begins after the release `after` and after the work `follows` on another lane."""

    __slots__ = ("after", "done", "end", "follows", "not_before", "started", "step")

    def __init__(
        self, step: TimedStep, after: _ReleaseEvent | None, not_before: float, follows: _Copy | None = None
    ) -> None:
        self.step, self.after, self.not_before, self.follows = step, after, not_before, follows
        self.started = self.end = math.inf
        self.done = False

    @property
    def is_ready(self) -> bool:
        return (self.after is None or self.after.done) and (self.follows is None or self.follows.done)


@dataclasses.dataclass(frozen=True)
class StepBoundary:
    """The state between two steps: the clock, the totals so far, and the remaining work of each lane."""

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
        self._lanes: dict[str, deque[_Copy]] = {}
        # Free encoded buffers, each by the last decode from there.
        self._encoded: deque[_Copy | None] = deque([None] * ENCODED_BUFFERS)
        self._free = list(range(self.slots))
        self._freed: dict[int, _ReleaseEvent] = {}
        self._ahead: dict[int, _Copy] = {}

    def boundary(self) -> StepBoundary:
        """Return the state between the last step and the next."""
        backlog = sorted((f"{copy.step.layer} is there", 0.0) for copy in self._ahead.values() if copy.done)
        for name, queue in self._lanes.items():
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
        # Copies of encoded banks that are not decoded yet, by slot.
        self._copied: dict[int, deque[_Copy]] = defaultdict(deque)
        self._begun_slots: set[int] = set()
        self._has_begun = False
        self._copy_of: dict[int, _Copy] = {}
        self._release_at: dict[int, tuple[_ReleaseEvent, _Copy]] = {}

    def _issue(self, run: SimulatedRun, following: SimulatedRun, index: int, step: TimedStep, time: float) -> None:
        """Issue a step on the host: copies join their queues, and releases record their events."""
        if step.op == "segment":
            return
        if step.slot not in (self._copied if step.op == "decode" else self._in_slot) and step.op != "prefetch":
            raise never_filled(step)
        buffer = self._buffer_of[step.slot]
        if step.op == "prefetch":
            is_first = step.slot not in self._begun_slots
            self._begun_slots.add(step.slot)
            ahead = self._ahead.pop(buffer, None) if is_first else None
            copy = self._copy(step, self._freed.get(buffer), time) if ahead is None else ahead
            if step.is_encoded:
                self._copied[step.slot].append(copy)
            else:
                self._in_slot[step.slot] = copy
            if fills_slot(copy.step):
                self._begin_ahead(run, following, time)
        elif step.op == "decode":
            copied = self._copied[step.slot].popleft()
            # The previous run may have decoded it already.
            is_decoded = copied.step.op == "decode"
            decode = copied if is_decoded else self._decode(step, self._freed.get(buffer), time, copied)
            self._in_slot[step.slot] = decode
            self._begin_ahead(run, following, time)
        elif step.op == "acquire":
            self._copy_of[index] = self._in_slot[step.slot]
        else:
            released = _ReleaseEvent()
            self._freed[buffer] = released
            self._release_at[index] = (released, self._in_slot[step.slot])
            if index in run.last:
                self._free.append(buffer)
                self._fill_ahead(following, len(self._free) - 1, buffer, time)

    def _fill_ahead(self, following: SimulatedRun, slot: int, buffer: int, time: float) -> None:
        steps = following.beginning.get(slot)
        if self.machine.fills_ahead and steps is not None and buffer not in self._ahead:
            if steps[0].is_encoded and not self._encoded:
                return
            after = self._freed.get(buffer)
            copy = self._copy(steps[0], after, time)
            self._ahead[buffer] = self._decode(steps[1], after, time, copy) if steps[0].is_encoded else copy

    def _begin_ahead(self, run: SimulatedRun, following: SimulatedRun, time: float) -> None:
        """Fill the slots that this run does not use, once it has filled all those that it uses."""
        if len(self._begun_slots) == run.slots and not self._has_begun:
            self._has_begun = True
            for position, free in enumerate(self._free):
                self._fill_ahead(following, position, free, time)

    def _copy(self, step: TimedStep, after: _ReleaseEvent | None, time: float) -> _Copy:
        """Start a copy: into the slot once `after` is done, or into the encoded buffer that has been free longest."""
        if step.is_encoded:
            return self._enqueue(_Copy(step, None, time, self._encoded.popleft()))
        return self._enqueue(_Copy(step, after, time))

    def _decode(self, step: TimedStep, after: _ReleaseEvent | None, time: float, copied: _Copy) -> _Copy:
        decode = self._enqueue(_Copy(step, after, time, copied))
        self._encoded.append(decode)
        return decode

    def _enqueue(self, copy: _Copy) -> _Copy:
        self._lanes.setdefault(lane_of(copy.step), deque()).append(copy)
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
        """Move the clock to `limit`, or to the next change on a lane if that comes first."""
        self._start_copies()
        change = limit
        for queue in self._lanes.values():
            if queue:
                head = queue[0]
                if head.started <= self.now:
                    change = min(change, head.end)
                elif head.is_ready:
                    change = min(change, head.not_before)
        self.now = change
        for queue in self._lanes.values():
            if queue and queue[0].end <= change:
                queue.popleft().done = True

    def _start_copies(self) -> bool:
        """Start the copies and decodes that can start now, and return whether a lane is busy."""
        busy = False
        for name, queue in self._lanes.items():
            if not queue:
                continue
            head = queue[0]
            if head.started > self.now and head.not_before <= self.now and head.is_ready:
                head.started, head.end = self.now, self.now + head.step.seconds
                operation = DECODE if name == DECODE else "copy"
                self.events.append((operation, head.step.layer, name, head.started, head.end))
                if fills_slot(head.step):
                    self._bytes += head.step.nbytes
                    self.peak_bytes = max(self.peak_bytes, self._bytes)
            busy = busy or head.started <= self.now
        return busy
