"""Search for the banks that stay resident, and for the number of slots that all other banks use.

The best schedule has the least exposed time within the memory budget; among equal schedules, it has the fewest seconds
of transfers. Banks are copied in the order of need, as the ring does it, as early as link and slots allow.

Pseudo-code
    for each number of slots:
        for each resident set that fills the budget (all of them if there are few, else one per ranking): simulate it
    if not everything could be tried: exchange a resident and a streamed bank while that helps
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.protocol import PlanError
from moepass.passes.planner.phases import LayerPhase, RingSchedule, ring_schedule, streamed_phases
from moepass.passes.planner.simulation_engine import ExecutionModel

# All schedules are tried if there are at most this many, else this many of them. 94 layers take 0.3 to 0.6 ms each.
MOST_TRIED = 1500
_PERIODS = 24
# [Empirical] Banks that are tried in each role of an exchange. Trying all of them found no faster step in 36 plans of
# models with 46 to 94 layers, and took 2.4 times as long.
_MOST_CHANGED = 4
# Exchanges end once a round of them gains less than this fraction of the step.
_LEAST_GAIN = 1e-4
# Smaller relative differences are rounding.
_EPSILON = 1e-9
_PLAIN = ExecutionModel()


class BudgetError(PlanError):
    """Nothing fits into `value` bytes. `needed_bytes`, which is also `expected`, is the smallest budget that fits."""

    def __init__(self, memory_bytes: int, contents: str, needed_bytes: int) -> None:
        super().__init__(
            f"memory_bytes is {memory_bytes}; {contents} need {needed_bytes}",
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
    machine: ExecutionModel = _PLAIN,
) -> RingSchedule:
    """Return the best schedule of `phases` with at most `memory_bytes` for resident banks, shards and slots.

    There are `slots` slots, or by default up to `most_slots`, but at most as many as streamed banks. Times are for a
    steady state over one link, and assume that `machine` issues steps at no cost.

    Raises BudgetError if `slots` slots, by default one, do not fit. Raises ValueError if the number of slots is below 1
    or banks use several links.
    """
    counts = range(1, most_slots + 1) if slots is None else range(slots, slots + 1)
    if not counts or counts[0] < 1:
        raise ValueError(f"most_slots is {most_slots} and slots is {slots}; there must be at least one slot")
    links = {phases[position].link for position in streamed_phases(phases)}
    if len(links) > 1:
        raise ValueError(f"banks use {len(links)} links, {', '.join(sorted(links))}; the search supports one")
    search = _Search(phases, memory_bytes, counts, machine)
    if search.fits(counts[0], frozenset(search.banks)):
        return ring_schedule(phases, 0, search.banks)
    least = search.least_memory()
    if memory_bytes < least:
        held = "one slot" if counts[0] == 1 else f"{counts[0]} slots"
        raise BudgetError(memory_bytes, f"resident banks, shards and {held} for the others", least)
    return search.run()


def least_bank_bytes(phases: Sequence[LayerPhase], slots: int = 1) -> int:
    """Return the least bytes of banks, shards and `slots` slots on the device, over all sets of residents."""
    return _Search(phases, 0, range(slots, slots + 1)).least_memory()


def spread_evenly(positions: Sequence[int], count: int, fills_ahead: bool = True) -> list[int]:
    """Choose `count` of `positions` with equal gaps between them.

    Unless slots `fills_ahead`, the first of `positions` is chosen.
    """
    shift = 1 if fills_ahead else 0
    return [positions[(2 * index + shift) * len(positions) // (2 * count)] for index in range(count)]


def steady_step(
    phases: Sequence[LayerPhase], slots: int, resident: frozenset[int], machine: ExecutionModel = _PLAIN
) -> tuple[float, list[float]]:
    """Return the seconds of a step in the steady state, and how long each phase waits for its bank.

    The result equals `simulate_phases` for one link and a host that issues steps at no cost, but a recurrence is
    faster: copy k begins after copy k - 1 and after release k - slots, and without filling ahead not before its run. An
    encoded bank is written into its slot by its decode, which begins after its copy, the previous decode and release
    k - slots; its copy begins after copy k - 1 and the last but one decode, and not before its run.
    """
    # Compute seconds before each streamed phase, inside it, and after the last one (`gap`).
    positions = streamed_phases(phases, resident)
    streamed = set(positions)
    banks = [phases[position] for position in positions]
    count = len(positions)
    before: list[float] = []
    inside: list[float] = []
    gap = 0.0
    for index, phase in enumerate(phases):
        if index in streamed:
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
    link = decoder = now = 0.0
    ready: deque[float] = deque()
    # When encoded buffers are free, and when the copies of encoded banks end that are not decoded yet.
    buffers: deque[float] = deque([0.0] * ENCODED_BUFFERS)
    copied: deque[float] = deque()
    busy: deque[tuple[float, float]] = deque()
    ends = [0.0]
    previous: list[float] = []

    def work(begin: float, seconds: float) -> float:
        """Let a lane work from `begin` on; return the end."""
        if slowdown > 1:
            bisect.insort(busy, (begin, begin + seconds))
        return begin + seconds

    def copy(turn: int, earliest: float) -> None:
        """Start the copy of an encoded bank."""
        nonlocal link
        link = work(max(link, buffers.popleft(), earliest), banks[turn % count].transfer_seconds)
        copied.append(link)

    def fill(turn: int) -> None:
        """Fill a slot that is free now, and start the copies for which encoded buffers are free then."""
        nonlocal link, decoder
        bank = banks[turn % count]
        if bank.is_encoded:
            if not copied:
                copy(turn, now)
            decoder = work(max(decoder, copied.popleft(), now), bank.decode_seconds)
            buffers.append(decoder)
            ready.append(decoder)
        else:
            link = work(max(link, now), bank.transfer_seconds)
            ready.append(link)
        copy_ahead(turn + 1)

    def copy_ahead(turn: int) -> None:
        """Start the copies of encoded banks from `turn` on, while their prefetches are issued and buffers are free."""
        turn += len(copied)
        while buffers and banks[turn % count].is_encoded:
            run, position = divmod(turn, count)
            if position < slots:
                # It is filled at the end of the previous run, in which a device issues it from the beginning.
                if not machine.host_runs_ahead or run > period + fills_ahead:
                    break
            elif run > period:
                break
            copy(turn, run_begin)
            turn += 1

    for period in range(_PERIODS):
        run_begin = now
        if not (period and fills_ahead):
            for turn in range(slots):
                fill(turn)
        else:
            copy_ahead(period * count + slots)
        for index in range(count):
            now = _worked(now, before[index], busy, slowdown)
            arrival = ready.popleft()
            waits[positions[index]] = arrival - now if arrival > now else 0.0
            if arrival > now:
                now = arrival
            now = _worked(now, inside[index], busy, slowdown)
            if fills_ahead or index + slots < count:
                fill(period * count + index + slots)
        now = _worked(now, gap, busy, slowdown)
        ends.append(now)
        if not fills_ahead:
            return now, waits  # the next run starts from the same state
        moments = (link, decoder, *buffers, *copied, *ready)
        state = [*(max(moment - now, 0.0) for moment in moments), *(now - begun for begun, _ in busy)]
        if len(state) == len(previous) and all(
            abs(after - earlier) <= _EPSILON * now for after, earlier in zip(state, previous, strict=True)
        ):
            return ends[-1] - ends[-2], waits
        previous = state
    half = _PERIODS // 2
    return (ends[-1] - ends[half]) / (_PERIODS - half), waits


def _worked(now: float, seconds: float, busy: deque[tuple[float, float]], slowdown: float) -> float:
    """Return when a computation of `seconds` that begins now ends, if busy lanes slow it down by `slowdown`.

    The `busy` times are sorted by their beginnings, and may overlap.
    """
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

    def is_better_than(self, best: _Tried | None) -> bool:
        if best is None:
            return True
        slack = _EPSILON * best.step_seconds
        if abs(self.step_seconds - best.step_seconds) <= slack:
            return self.moved_seconds < best.moved_seconds
        return self.step_seconds < best.step_seconds


class _Search:
    def __init__(
        self, phases: Sequence[LayerPhase], memory_bytes: int, counts: range, machine: ExecutionModel = _PLAIN
    ) -> None:
        self.phases, self.memory_bytes, self.machine = phases, memory_bytes, machine
        self.counts = counts
        self.banks = streamed_phases(phases)
        self.compute_seconds = sum(phase.compute_seconds for phase in phases)
        # Seconds of the link or the decoder that a resident bank saves, per additional byte of memory.
        self.seconds_per_byte = {
            position: max(phases[position].transfer_seconds, phases[position].decode_seconds)
            / max(1, phases[position].stay_bytes)
            for position in self.banks
        }
        # Most layers have the same size, so the memory depends on how many of each size stay.
        self._size_of = {
            position: (phase.bank_bytes, phase.shard_bytes, phase.slot_bytes, phase.encoded_bytes)
            for position, phase in enumerate(phases)
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
        # All banks may take less memory than shards and slots.
        stays = (*self.largest_first(), self.banks)
        return min(self.memory(self.counts[0], frozenset(stay)) for stay in stays)

    def largest_first(self) -> Iterator[list[int]]:
        """Yield the smallest resident set for each possible size of slots and encoded buffer: larger banks stay."""
        phases = [(position, self.phases[position]) for position in self.banks]
        slots = sorted({phase.slot_bytes for _, phase in phases}, reverse=True)
        buffers = sorted({phase.encoded_bytes for _, phase in phases}, reverse=True)
        for slot, buffer in itertools.product(slots, buffers):
            yield [position for position, phase in phases if phase.slot_bytes > slot or phase.encoded_bytes > buffer]

    # ---- Bounds

    def least_step(self) -> float:
        """Return a lower bound for every schedule within the budget: computation, link, decoder, or slots."""
        return min(
            max(
                self.compute_seconds,
                self._least(slots, must_stay, lambda phase: phase.transfer_seconds),
                self._least(slots, must_stay, lambda phase: phase.decode_seconds),
                self._least(slots, must_stay, lambda phase: phase.write_seconds + phase.compute_seconds) / slots,
            )
            for slots in self.counts
            for must_stay in self.largest_first()
        )

    def _least(self, slots: int, must_stay: list[int], value: Callable[[LayerPhase], float]) -> float:
        """Return the least sum of `value` over streamed banks, if fractions of banks could stay (a knapsack bound)."""
        stay = frozenset(must_stay)
        available = float(self.memory_bytes - self.memory(slots, stay))
        if available < 0:
            # With several slots, a schedule with fewer streamed banks than slots may still fit.
            return 0.0 if self.counts[0] > 1 else math.inf
        total = 0.0
        streamed = [self.phases[position] for position in self.banks if position not in stay]
        for phase in sorted(streamed, key=lambda phase: value(phase) / max(1, phase.stay_bytes), reverse=True):
            fraction = 1.0 if phase.stay_bytes <= available else available / phase.stay_bytes
            total += (1 - fraction) * value(phase)
            available -= fraction * phase.stay_bytes
        return total

    def pace(self, slots: int, resident: frozenset[int]) -> float:
        """Return the lower bound for this resident set: computation, link busy, decoder busy, slots busy."""
        streamed = [self.phases[position] for position in self.banks if position not in resident]
        link = sum(phase.transfer_seconds for phase in streamed)
        decoder = sum(phase.decode_seconds for phase in streamed)
        held = sum(phase.write_seconds + phase.compute_seconds for phase in streamed)
        return max(self.compute_seconds, link, decoder, held / slots)

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
        """True if nothing can be faster than the best so far, or enough was tried."""
        if self.tried >= MOST_TRIED:
            self.is_exhaustive = False
            return True
        assert self.best is not None
        return self.best.step_seconds <= self.least * (1 + _EPSILON)

    def _try(self, slots: int, resident: frozenset[int]) -> _Tried:
        self.tried += 1
        step, waits = steady_step(self.phases, slots, resident, self.machine)
        moved = sum(self.phases[position].transfer_seconds for position in self.streamed(resident))
        tried = _Tried(step, moved, slots, resident, tuple(waits))
        if tried.is_better_than(self.best):
            self.best = tried
        if tried.is_better_than(self.best_with.get(slots)):
            self.best_with[slots] = tried
        return tried

    def _resident_sets(self, slots: int) -> Iterator[frozenset[int]]:
        """Yield sets to which no further bank can be added: a resident bank never makes a step slower."""
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
                for position in ranking:
                    if position not in resident and (
                        self.fits(slots, resident | {position}) or not self.fits(slots, resident)
                    ):
                        resident |= {position}
                if self.fits(slots, resident):
                    yield resident

    def _rankings(self, slots: int, must_stay: frozenset[int]) -> Iterator[list[int]]:
        """Yield orders in which banks become resident while memory is left."""
        movable = [position for position in self.banks if position not in must_stay]
        yield sorted(movable, key=self.seconds_per_byte.__getitem__, reverse=True)
        # Even spreads give every streamed bank the same computation to hide its transfer.
        available = self.memory_bytes - self.memory(slots, must_stay)
        size = max(sum(self.phases[position].stay_bytes for position in movable) // len(movable), 1) if movable else 1
        count = max(0, min(len(movable), available // size))
        yield spread_evenly(movable, count, self.machine.fills_ahead) + movable
        yield movable
        yield movable[::-1]
        yield sorted(movable, key=lambda position: self.phases[position].compute_seconds)
        # Greedily make the bank with the longest wait resident.
        ranking: list[int] = []
        while len(ranking) < count and self.tried < MOST_TRIED // 2:
            resident = must_stay | frozenset(ranking)
            self.tried += 1
            _, waits = steady_step(self.phases, slots, resident, self.machine)
            worst = max(
                self.streamed(resident), key=lambda position: (waits[position], self.phases[position].transfer_seconds)
            )
            if not waits[worst]:
                break
            ranking.append(worst)
        yield ranking + movable

    def _exchange(self) -> None:
        """Improve the best schedule for each number of slots by exchanges, until none helps."""
        for start in sorted(self.best_with.values(), key=lambda tried: tried.step_seconds):
            best, last_seconds = start, math.inf
            while best.step_seconds < last_seconds * (1 - _LEAST_GAIN) and not self.is_done:
                last_seconds = best.step_seconds
                best = self._best_neighbour(best)

    def _best_neighbour(self, best: _Tried) -> _Tried:
        """Return the best schedule among `best` and its neighbours."""
        for neighbour in list(self._neighbours(best)):
            if self.tried >= MOST_TRIED:
                break
            if self.fits(*neighbour):
                tried = self._try(*neighbour)
                best = tried if tried.is_better_than(best) else best
        return best

    def _neighbours(self, best: _Tried) -> Iterator[tuple[int, frozenset[int]]]:
        # Make a waiting bank resident in position of one or several residents, or of a slot.
        waiting = sorted(self.streamed(best.resident), key=lambda position: -best.waits[position])[:_MOST_CHANGED]
        for entering in waiting:
            nearest = sorted(best.resident, key=lambda position: abs(position - entering))[:_MOST_CHANGED]
            for leaving in nearest:
                yield best.slots, best.resident - {leaving} | {entering}
        for slots in (best.slots, best.slots - 1, best.slots + 1):
            if slots in self.counts:
                for entering in waiting:
                    yield slots, self._filled(slots, best.resident, entering, None)
                for leaving in sorted(best.resident)[:: 1 + len(best.resident) // _MOST_CHANGED]:
                    yield slots, self._filled(slots, best.resident, None, leaving)

    def _filled(
        self, slots: int, resident: frozenset[int], entering: int | None, leaving: int | None
    ) -> frozenset[int]:
        """Return `resident` with one bank added or removed, and then filled with as many other banks as fit."""
        value = self.seconds_per_byte
        changed = resident - {leaving} | ({entering} if entering is not None else set())
        for position in sorted(changed - {entering}, key=value.__getitem__):
            if self.fits(slots, changed):
                break
            changed -= {position}
        for position in sorted(set(self.banks) - changed - {leaving}, key=value.__getitem__, reverse=True):
            if self.fits(slots, changed | {position}):
                changed |= {position}
        return changed
