"""Find which banks stay resident, and how many slots the others pass through.

The best schedule is the one with the least exposed time within the memory budget; of equal ones that which moves less.
Banks are copied in the order in which they are needed, as the ring does it, as early as link and slots allow.

Pseudo-code
    for each number of slots:
        for each resident set that fills the budget (all of them where they are few, else one of each kind): its step
    where not everything could be tried: exchange a resident and a streamed bank while that helps
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from moepass.passes.ir.protocol import PlanError
from moepass.passes.planner.phases import LayerPhase, RingSchedule, ring_schedule, streamed_phases
from moepass.passes.planner.simulation_engine import Machine

# Below this many schedules all are tried; above it, as many as this at most. 94 layers take about 0.3 ms each.
MOST_TRIED = 1500
_PERIODS = 12
# Relative: what is smaller is rounding.
_EPSILON = 1e-9
_PLAIN = Machine()


class BudgetError(PlanError):
    """Nothing fits into `value` bytes; `needed_bytes`, which are `expected`, are the least that do."""

    def __init__(self, memory_bytes: int, what: str, needed_bytes: int) -> None:
        super().__init__(
            f"memory_bytes is {memory_bytes}; {what} need {needed_bytes}",
            name="memory_bytes",
            value=memory_bytes,
            expected=needed_bytes,
        )
        self.needed_bytes = needed_bytes


def search_schedule(
    phases: Sequence[LayerPhase],
    memory_bytes: int,
    most_slots: int = 4,
    slots: int | None = None,
    machine: Machine = _PLAIN,
) -> RingSchedule:
    """The best schedule of `phases` whose resident banks, shards and slots take `memory_bytes` together at most.

    There are `slots` slots, or up to `most_slots` where that is None, but no more than banks to stream. Times are those
    of a steady state over one link, on a `machine` that issues steps in no time.

    Raises BudgetError where not even one slot, or `slots` of them, fit; ValueError where there may be no slot or there
    are several links.
    """
    counts = range(1, most_slots + 1) if slots is None else range(slots, slots + 1)
    if not counts or counts[0] < 1:
        raise ValueError(f"most_slots is {most_slots} and slots {slots}; there must be a slot or more")
    links = {phases[place].link for place in streamed_phases(phases)}
    if len(links) > 1:
        raise ValueError(f"banks come over {len(links)} links, {', '.join(sorted(links))}; the search knows one")
    search = _Search(phases, memory_bytes, counts, machine)
    if search.fits(counts[0], frozenset(search.banks)):
        return ring_schedule(phases, 0, search.banks)
    least = search.least_memory()
    if memory_bytes < least:
        held = "one slot" if counts[0] == 1 else f"{counts[0]} slots"
        raise BudgetError(memory_bytes, f"resident banks, shards and {held} for the others", least)
    return search.run()


def least_bank_bytes(phases: Sequence[LayerPhase], slots: int = 1) -> int:
    """The least that banks, shards and `slots` slots take on the device, whatever stays."""
    return _Search(phases, 0, range(slots, slots + 1)).least_memory()


def spread_evenly(places: Sequence[int], count: int, fills_ahead: bool = True) -> list[int]:
    """`count` of `places`, so that as many of the others lie between two of them everywhere.

    Where nothing `fills_ahead`, the first of them is the first of `places`.
    """
    shift = 1 if fills_ahead else 0
    return [places[(2 * index + shift) * len(places) // (2 * count)] for index in range(count)]


def steady_step(
    phases: Sequence[LayerPhase], slots: int, resident: frozenset[int], machine: Machine = _PLAIN
) -> tuple[float, list[float]]:
    """Seconds of a step in the steady state, and how long each phase waits for its bank in the last one looked at.

    The same as `simulate_phases` gives for one link and a host that issues steps in no time, by a recurrence that is
    quicker: copy k ends its transfer after copy k - 1 and after release k - slots, and where nothing is filled ahead it
    does not start before its run.
    """
    # For each streamed phase: compute in front of it, and its own. Then what follows the last one.
    places = streamed_phases(phases, resident)
    streamed = set(places)
    transfers = [phases[place].transfer_seconds for place in places]
    count = len(places)
    before: list[float] = []
    inside: list[float] = []
    gap = 0.0
    for place, phase in enumerate(phases):
        if place in streamed:
            before.append(gap)
            inside.append(phase.compute_seconds)
            gap = 0.0
        else:
            gap += phase.compute_seconds
    waits = [0.0] * len(phases)
    if not count:
        return gap, waits
    slots = min(slots, count)
    fills_ahead, slowdown = machine.fills_ahead, machine.copy_slowdown
    link = now = 0.0
    ready: deque[float] = deque()
    busy: deque[tuple[float, float]] = deque()
    ends = [0.0]
    previous: list[float] = []

    def copy(turn: int) -> None:
        """Into a slot that is free now."""
        nonlocal link
        begun = link if link > now else now
        link = begun + transfers[turn % count]
        ready.append(link)
        if slowdown > 1:
            busy.append((begun, link))

    for period in range(_PERIODS):
        if not (period and fills_ahead):
            for turn in range(slots):
                copy(turn)
        for index in range(count):
            now = _worked(now, before[index], busy, slowdown)
            there = ready.popleft()
            waits[places[index]] = there - now if there > now else 0.0
            if there > now:
                now = there
            now = _worked(now, inside[index], busy, slowdown)
            if fills_ahead or index + slots < count:
                copy(index + slots)
        now = _worked(now, gap, busy, slowdown)
        ends.append(now)
        if not fills_ahead:
            return now, waits  # nothing is left over for the next run
        state = [now - link, *(moment - now for moment in ready), *(now - begun for begun, _ in busy)]
        if len(state) == len(previous) and all(
            abs(one - other) <= _EPSILON * now for one, other in zip(state, previous, strict=True)
        ):
            return ends[-1] - ends[-2], waits
        previous = state
    half = _PERIODS // 2
    return (ends[-1] - ends[half]) / (_PERIODS - half), waits


def _worked(now: float, seconds: float, busy: deque[tuple[float, float]], slowdown: float) -> float:
    """When computation of `seconds` ends that begins now: it takes `slowdown` times as long while the link is busy."""
    while busy and seconds > 0:
        begun, ended = busy[0]
        if ended <= now:
            busy.popleft()
            continue
        if begun >= now + seconds:
            break
        if begun > now:
            seconds -= begun - now
            now = begun
        if now + seconds * slowdown <= ended:
            return now + seconds * slowdown
        seconds -= (ended - now) / slowdown
        now = ended
    return now + seconds


@dataclasses.dataclass(frozen=True)
class _Tried:
    step_seconds: float
    moved_seconds: float
    slots: int
    resident: frozenset[int]
    waits: tuple[float, ...]

    def is_better_than(self, other: _Tried | None) -> bool:
        if other is None:
            return True
        slack = _EPSILON * other.step_seconds
        if abs(self.step_seconds - other.step_seconds) <= slack:
            return self.moved_seconds < other.moved_seconds
        return self.step_seconds < other.step_seconds


class _Search:
    def __init__(
        self, phases: Sequence[LayerPhase], memory_bytes: int, counts: range, machine: Machine = _PLAIN
    ) -> None:
        self.phases, self.memory_bytes, self.machine = phases, memory_bytes, machine
        self.counts = counts
        self.banks = streamed_phases(phases)
        self.compute_seconds = sum(phase.compute_seconds for phase in phases)
        # What a bank that stays saves of the link, for the memory that it takes more.
        self.seconds_per_byte = {
            place: phases[place].transfer_seconds / max(1, phases[place].stay_bytes) for place in self.banks
        }
        # Most layers of a model are of one size: it is the number of those that stay which takes memory.
        self._size_of = {
            place: (phase.bank_bytes, phase.shard_bytes, phase.slot_bytes) for place, phase in enumerate(phases)
        }
        self._memory: dict[tuple[int, frozenset[tuple[object, int]]], int] = {}
        self.tried = 0
        self.is_exhaustive = True
        self.best: _Tried | None = None
        self.best_with: dict[int, _Tried] = {}

    def streamed(self, resident: frozenset[int]) -> tuple[int, ...]:
        return streamed_phases(self.phases, resident)

    # ---- Memory

    def memory(self, slots: int, resident: frozenset[int]) -> int:
        sizes = Counter(map(self._size_of.__getitem__, resident))
        key = slots, frozenset(sizes.items())
        if key not in self._memory:
            self._memory[key] = ring_schedule(self.phases, slots, resident).memory_bytes
        return self._memory[key]

    def fits(self, slots: int, resident: frozenset[int]) -> bool:
        return self.memory(slots, resident) <= self.memory_bytes

    def least_memory(self) -> int:
        # Beside shards, all banks may take less than shards and slots do.
        stays = (*self.largest_first(), self.banks)
        return min(self.memory(self.counts[0], frozenset(stay)) for stay in stays)

    def largest_first(self) -> Iterator[list[int]]:
        """The smallest resident set for each size that a slot can have: everything that is larger stays."""
        for size in sorted({self.phases[place].slot_bytes for place in self.banks}, reverse=True):
            yield [place for place in self.banks if self.phases[place].slot_bytes > size]

    # ---- Bounds

    def least_step(self) -> float:
        """No schedule within the budget is faster: what must move at least, over link and slots, or the computation."""
        return min(
            max(
                self.compute_seconds,
                self._least(slots, must_stay, lambda phase: phase.transfer_seconds),
                self._least(slots, must_stay, lambda phase: phase.transfer_seconds + phase.compute_seconds) / slots,
            )
            for slots in self.counts
            for must_stay in self.largest_first()
        )

    def _least(self, slots: int, must_stay: list[int], value: Callable[[LayerPhase], float]) -> float:
        """The least sum of `value` over streamed banks, if parts of banks could stay too (a fractional knapsack)."""
        stay = frozenset(must_stay)
        room = float(self.memory_bytes - self.memory(slots, stay))
        if room < 0:
            # Beside shards, few streamed banks in as many slots may fit where more in no more slots do not.
            return 0.0 if self.counts[0] > 1 else math.inf
        total = 0.0
        streamed = [self.phases[place] for place in self.banks if place not in stay]
        for phase in sorted(streamed, key=lambda phase: value(phase) / max(1, phase.stay_bytes), reverse=True):
            part = 1.0 if phase.stay_bytes <= room else room / phase.stay_bytes
            total += (1 - part) * value(phase)
            room -= part * phase.stay_bytes
        return total

    def pace(self, slots: int, resident: frozenset[int]) -> float:
        """The bound for this resident set: longest path, link busy, slots busy."""
        streamed = [self.phases[place] for place in self.banks if place not in resident]
        link = sum(phase.transfer_seconds for phase in streamed)
        held = sum(phase.transfer_seconds + phase.compute_seconds for phase in streamed)
        return max(self.compute_seconds, link, held / slots)

    # ---- Trying

    def run(self) -> RingSchedule:
        self.least = self.least_step()
        for slots in self.counts:
            for resident in self._resident_sets(slots):
                if self.best is None or self.pace(slots, resident) < self.best.step_seconds * (1 + _EPSILON):
                    self._try(slots, resident)
                if self.is_done:
                    break
        if not self.is_exhaustive:
            self._exchange()
        assert self.best is not None
        return ring_schedule(self.phases, self.best.slots, self.best.resident)

    @property
    def is_done(self) -> bool:
        """Nothing can be faster than the best so far, or enough was tried."""
        if self.tried >= MOST_TRIED:
            self.is_exhaustive = False
            return True
        assert self.best is not None
        return self.best.step_seconds <= self.least * (1 + _EPSILON)

    def _try(self, slots: int, resident: frozenset[int]) -> _Tried:
        self.tried += 1
        step, waits = steady_step(self.phases, slots, resident, self.machine)
        moved = sum(self.phases[place].transfer_seconds for place in self.streamed(resident))
        found = _Tried(step, moved, slots, resident, tuple(waits))
        if found.is_better_than(self.best):
            self.best = found
        if found.is_better_than(self.best_with.get(slots)):
            self.best_with[slots] = found
        return found

    def _resident_sets(self, slots: int) -> Iterator[frozenset[int]]:
        """Sets to which no further bank can be added: what stays never makes a step slower."""
        if 2 ** min(len(self.banks), 64) * len(self.counts) <= MOST_TRIED:
            subsets = (
                frozenset(chosen)
                for size in range(len(self.banks), -1, -1)
                for chosen in itertools.combinations(self.banks, size)
            )
            seen: list[frozenset[int]] = []
            for resident in subsets:
                if self.fits(slots, resident) and not any(resident < larger for larger in seen):
                    seen.append(resident)
                    yield resident
            return
        self.is_exhaustive = False
        for must_stay in self.largest_first():
            for ranking in self._rankings(slots, frozenset(must_stay)):
                resident = frozenset(must_stay)
                for place in ranking:
                    if place not in resident and (
                        self.fits(slots, resident | {place}) or not self.fits(slots, resident)
                    ):
                        resident |= {place}
                if self.fits(slots, resident):
                    yield resident

    def _rankings(self, slots: int, must_stay: frozenset[int]) -> Iterator[list[int]]:
        """In which order banks are made resident while there is room."""
        movable = [place for place in self.banks if place not in must_stay]
        yield sorted(movable, key=self.seconds_per_byte.__getitem__, reverse=True)
        # Evenly spread, so that each streamed bank has as much computation to hide behind as the others.
        room = self.memory_bytes - self.memory(slots, must_stay)
        size = max(sum(self.phases[place].stay_bytes for place in movable) // len(movable), 1) if movable else 1
        count = max(0, min(len(movable), room // size))
        yield spread_evenly(movable, count, self.machine.fills_ahead) + movable
        yield movable
        yield movable[::-1]
        yield sorted(movable, key=lambda place: self.phases[place].compute_seconds)
        # Where the transfers wait, one after the other.
        ranking: list[int] = []
        while len(ranking) < count and self.tried < MOST_TRIED // 2:
            resident = must_stay | frozenset(ranking)
            self.tried += 1
            _, waits = steady_step(self.phases, slots, resident, self.machine)
            worst = max(self.streamed(resident), key=lambda place: (waits[place], self.phases[place].transfer_seconds))
            if not waits[worst]:
                break
            ranking.append(worst)
        yield ranking + movable

    def _exchange(self) -> None:
        """Improve what was best with each number of slots step by step: first exchange that helps, until none does."""
        for start in sorted(self.best_with.values(), key=lambda found: found.step_seconds):
            best: _Tried | None = start
            while best is not None and not self.is_done:
                best = self._first_better(best)

    def _first_better(self, best: _Tried) -> _Tried | None:
        for neighbour in self._neighbours(best):
            if self.tried >= MOST_TRIED:
                return None
            if not self.fits(*neighbour):
                continue
            found = self._try(*neighbour)
            if found.is_better_than(best):
                return found
        return None

    def _neighbours(self, best: _Tried) -> Iterator[tuple[int, frozenset[int]]]:
        # A bank that waits changes places with a resident one, or takes the room of several, or of a slot.
        waiting = sorted(self.streamed(best.resident), key=lambda place: -best.waits[place])
        for place in waiting:
            for other in sorted(best.resident, key=lambda other: abs(other - place)):
                yield best.slots, best.resident - {other} | {place}
        for slots in (best.slots, best.slots - 1, best.slots + 1):
            if slots in self.counts:
                for place in waiting:
                    yield slots, self._filled(slots, best.resident, place, None)
                for place in best.resident:
                    yield slots, self._filled(slots, best.resident, None, place)

    def _filled(
        self, slots: int, resident: frozenset[int], entering: int | None, leaving: int | None
    ) -> frozenset[int]:
        """`resident` with one bank more, or one less, and as many of the others as fit then."""
        value = self.seconds_per_byte
        changed = resident - {leaving} | ({entering} if entering is not None else set())
        for place in sorted(changed - {entering}, key=value.__getitem__):
            if self.fits(slots, changed):
                break
            changed -= {place}
        for place in sorted(set(self.banks) - changed - {leaving}, key=value.__getitem__, reverse=True):
            if self.fits(slots, changed | {place}):
                changed |= {place}
        return changed
