"""Find which banks stay resident, how many slots the others pass through, and in which order they are copied.

The best schedule is the one with the least exposed time within the memory budget; of equal ones that which moves less.
Copies start as early as order, link and slots allow, because waiting never helps.

Pseudo-code
    for each number of slots:
        resident sets that fill the budget: all of them where they are few, else some that stand for kinds of them
        for each, the copies in the order of need; where that leaves more exposed time than the bounds explain, others
    where not everything could be tried: exchange a resident and a streamed bank, or two copies, while that helps
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from moepass.passes.ir.protocol import PlanError
from moepass.passes.planner.phases import LayerPhase, streamed_stages

# Below this many schedules all are tried; above it, as many as this at most. 94 layers take about 0.3 ms each.
MOST_TRIED = 1500
_PERIODS = 12
# Relative: what is smaller is rounding.
_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True)
class FoundSchedule:
    """`resident` and `order` are positions of stages; `order` is that of the copies, over `slots` slots.

    `least_exposed_seconds` is a bound that no schedule within the budget can beat, from the longest path and the time
    that link and slots are busy. `tried` schedules were compared; with `is_exhaustive` there are no others.
    """

    slots: int
    slot_bytes: int
    resident: tuple[int, ...]
    order: tuple[int, ...]
    step_seconds: float
    exposed_seconds: float
    least_exposed_seconds: float
    resident_bytes: int
    tried: int
    is_exhaustive: bool

    @property
    def distance(self) -> int:
        """How many layers with experts ahead of its use a bank starts to move."""
        return max(0, self.slots - 1)

    @property
    def memory_bytes(self) -> int:
        return self.resident_bytes + self.slots * self.slot_bytes


def search_schedule(
    stages: Sequence[LayerPhase], memory_bytes: int, most_slots: int = 4, most_tried: int = MOST_TRIED
) -> FoundSchedule:
    """The best schedule of `stages` whose resident banks and slots take `memory_bytes` together at most.

    There are `most_slots` slots at most. Times are those of a steady state over one link, in which copies do not slow
    computation down.

    Raises PlanError where not even one slot fits, ValueError where `most_slots` is below 1 or there are several links.
    """
    if most_slots < 1:
        raise ValueError(f"most_slots is {most_slots}; it must be a number of slots from 1 on")
    links = {stages[place].link for place in streamed_stages(stages)}
    if len(links) > 1:
        raise ValueError(f"banks come over {len(links)} links, {', '.join(sorted(links))}; the search knows one")
    search = _Search(stages, memory_bytes, most_slots, most_tried)
    if search.fits(most_slots, frozenset(search.banks)):
        return search.all_resident()
    least = min(search.memory(1, frozenset(must_stay)) for must_stay in search.largest_first())
    if memory_bytes < least:
        raise PlanError(f"memory_bytes is {memory_bytes}; resident banks and one slot for the others need {least}")
    return search.run()


def steady_step(
    stages: Sequence[LayerPhase], slots: int, resident: frozenset[int], order: Sequence[int]
) -> tuple[float, list[float]]:
    """Seconds of a step in the steady state, and how long each stage waits for its bank in the last one looked at.

    The same as `simulate_stages` gives for one link and no slowdown, by a recurrence that is quicker: copy k ends its
    transfer after copy k - 1 and after release k - slots.
    """
    # For each streamed stage: compute in front of it, its turn among the copies. Then what follows the last one.
    turn_of = {place: turn for turn, place in enumerate(order)}
    transfers = [stages[place].transfer_seconds for place in order]
    count = len(order)
    before: list[float] = []
    inside: list[float] = []
    turns: list[int] = []
    places: list[int] = []
    gap = 0.0
    for place, stage in enumerate(stages):
        if place in turn_of:
            before.append(gap)
            inside.append(stage.compute_seconds)
            turns.append(turn_of[place])
            places.append(place)
            gap = 0.0
        else:
            gap += stage.compute_seconds
    waits = [0.0] * len(stages)
    if not count:
        return gap, waits
    slots = min(slots, count)
    released: list[float] = []
    copied: list[float] = []
    link = now = 0.0
    ends: list[float] = [0.0]
    previous: list[float] = []
    for period in range(_PERIODS):
        base = period * count
        for index in range(count):
            now += before[index]
            last = base + turns[index]
            while len(copied) <= last:
                turn = len(copied)
                free = released[turn - slots] if turn >= slots else 0.0
                link = (link if link > free else free) + transfers[turn % count]
                copied.append(link)
            ready = copied[last]
            waits[places[index]] = ready - now if ready > now else 0.0
            if ready > now:
                now = ready
            now += inside[index]
            released.append(now)
        now += gap
        ends.append(now)
        state = [now - link] + [now - moment for moment in released[-slots:]]
        if period and all(abs(one - other) <= _EPSILON * now for one, other in zip(state, previous, strict=True)):
            return ends[-1] - ends[-2], waits
        previous = state
    half = _PERIODS // 2
    return (ends[-1] - ends[half]) / (_PERIODS - half), waits


def copy_orders(count: int, slots: int) -> Iterator[tuple[int, ...]]:
    """Every order of `count` copies that `slots` slots can run, that of need first.

    The copy with turn k waits for release k - slots, so bank q must have a turn before q + slots.
    """

    def extend(order: tuple[int, ...], left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield order
            return
        turn = len(order)
        for index, bank in enumerate(left):
            rest = left[:index] + left[index + 1 :]
            if not rest or turn + 1 < rest[0] + slots:
                yield from extend((*order, bank), rest)

    return extend((), tuple(range(count)))


@dataclasses.dataclass(frozen=True)
class _Tried:
    step_seconds: float
    moved_seconds: float
    slots: int
    resident: frozenset[int]
    order: tuple[int, ...]
    waits: tuple[float, ...]

    def is_better_than(self, other: _Tried | None) -> bool:
        if other is None:
            return True
        slack = _EPSILON * other.step_seconds
        if abs(self.step_seconds - other.step_seconds) <= slack:
            return self.moved_seconds < other.moved_seconds
        return self.step_seconds < other.step_seconds


class _Search:
    def __init__(self, stages: Sequence[LayerPhase], memory_bytes: int, most_slots: int, most_tried: int) -> None:
        self.stages, self.memory_bytes, self.most_tried = stages, memory_bytes, most_tried
        self.counts = range(1, most_slots + 1)
        self.banks = streamed_stages(stages)
        self.compute_seconds = sum(stage.compute_seconds for stage in stages)
        self.tried = 0
        self.is_exhaustive = True
        self.best: _Tried | None = None
        self.best_with: dict[int, _Tried] = {}

    # ---- Memory

    def bytes_of(self, places: Iterable[int]) -> int:
        return sum(self.stages[place].bank_bytes for place in places)

    def slot_bytes(self, resident: frozenset[int]) -> int:
        return max((self.stages[place].bank_bytes for place in self.banks if place not in resident), default=0)

    def memory(self, slots: int, resident: frozenset[int]) -> int:
        used = min(slots, len(self.banks) - len(resident))
        return self.bytes_of(resident) + used * self.slot_bytes(resident)

    def fits(self, slots: int, resident: frozenset[int]) -> bool:
        return self.memory(slots, resident) <= self.memory_bytes

    def largest_first(self) -> Iterator[list[int]]:
        """The smallest resident set for each size that a slot can have: everything that is larger stays."""
        for size in sorted({self.stages[place].bank_bytes for place in self.banks}, reverse=True):
            yield [place for place in self.banks if self.stages[place].bank_bytes > size]

    # ---- Bounds

    def least_step(self) -> float:
        """No schedule within the budget is faster: what must move at least, over link and slots, or the computation."""
        return min(
            max(
                self.compute_seconds,
                self._least(slots, must_stay, lambda stage: stage.transfer_seconds),
                self._least(slots, must_stay, lambda stage: stage.transfer_seconds + stage.compute_seconds) / slots,
            )
            for slots in self.counts
            for must_stay in self.largest_first()
        )

    def _least(self, slots: int, must_stay: list[int], value: Callable[[LayerPhase], float]) -> float:
        """The least sum of `value` over streamed banks, if parts of banks could stay too (a fractional knapsack)."""
        stay = frozenset(must_stay)
        room = float(self.memory_bytes - self.memory(slots, stay))
        if room < 0:
            return math.inf
        total = 0.0
        streamed = [self.stages[place] for place in self.banks if place not in stay]
        for stage in sorted(streamed, key=lambda stage: value(stage) / stage.bank_bytes, reverse=True):
            part = min(1.0, room / stage.bank_bytes)
            total += (1 - part) * value(stage)
            room -= part * stage.bank_bytes
        return total

    def pace(self, slots: int, resident: frozenset[int]) -> float:
        """The bound for this resident set: longest path, link busy, slots busy."""
        streamed = [self.stages[place] for place in self.banks if place not in resident]
        link = sum(stage.transfer_seconds for stage in streamed)
        held = sum(stage.transfer_seconds + stage.compute_seconds for stage in streamed)
        return max(self.compute_seconds, link, held / slots)

    # ---- Trying

    def all_resident(self) -> FoundSchedule:
        self._try(1, frozenset(self.banks), ())
        self.least = self.compute_seconds
        return self._found()

    def run(self) -> FoundSchedule:
        self.least = self.least_step()
        for slots in self.counts:
            for resident in self._resident_sets(slots):
                self._try_orders(slots, resident)
                if self.is_done:
                    break
        if not self.is_exhaustive:
            self._exchange()
        return self._found()

    @property
    def is_done(self) -> bool:
        """Nothing can be faster than the best so far, or enough was tried."""
        if self.tried >= self.most_tried:
            self.is_exhaustive = False
            return True
        assert self.best is not None
        return self.best.step_seconds <= self.least * (1 + _EPSILON)

    def _try(self, slots: int, resident: frozenset[int], order: tuple[int, ...]) -> _Tried:
        self.tried += 1
        step, waits = steady_step(self.stages, slots, resident, order)
        moved = sum(self.stages[place].transfer_seconds for place in order)
        found = _Tried(step, moved, slots, resident, order, tuple(waits))
        if found.is_better_than(self.best):
            self.best = found
        if found.is_better_than(self.best_with.get(slots)):
            self.best_with[slots] = found
        return found

    def _resident_sets(self, slots: int) -> Iterator[frozenset[int]]:
        """Sets to which no further bank can be added: what stays never makes a step slower."""
        if 2 ** min(len(self.banks), 64) * len(self.counts) <= self.most_tried:
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
                if not self.fits(slots, resident):
                    continue
                for place in ranking:
                    if place not in resident and self.fits(slots, resident | {place}):
                        resident |= {place}
                yield resident

    def _rankings(self, slots: int, must_stay: frozenset[int]) -> Iterator[list[int]]:
        """In which order banks are made resident while there is room."""
        movable = [place for place in self.banks if place not in must_stay]
        yield sorted(movable, key=lambda place: -self.stages[place].transfer_seconds / self.stages[place].bank_bytes)
        # Evenly spread, so that each streamed bank has as much computation to hide behind as the others.
        room = self.memory_bytes - self.memory(slots, must_stay)
        size = max(self.bytes_of(movable) // len(movable), 1) if movable else 1
        count = min(len(movable), room // size)
        spread = [movable[(2 * index + 1) * len(movable) // (2 * count)] for index in range(count)] if count else []
        yield spread + movable
        yield movable
        yield movable[::-1]
        yield sorted(movable, key=lambda place: self.stages[place].compute_seconds)
        # Where the transfers wait, one after the other.
        ranking: list[int] = []
        while len(ranking) < count and self.tried < self.most_tried // 2:
            resident = must_stay | frozenset(ranking)
            order = tuple(place for place in self.banks if place not in resident)
            self.tried += 1
            _, waits = steady_step(self.stages, slots, resident, order)
            worst = max(order, key=lambda place: (waits[place], self.stages[place].transfer_seconds))
            if not waits[worst]:
                break
            ranking.append(worst)
        yield ranking + movable

    def _try_orders(self, slots: int, resident: frozenset[int]) -> None:
        needed = tuple(place for place in self.banks if place not in resident)
        if self.best is not None and self.pace(slots, resident) >= self.best.step_seconds * (1 + _EPSILON):
            return
        self._try(slots, resident, needed)
        if self.is_done or len({self.stages[place].transfer_seconds for place in needed}) <= 1:
            # Transfers of equal length: that of the bank that is needed first is never worth putting off.
            return
        if (slots ** max(0, len(needed) - slots)) * min(slots, len(needed)) > self.most_tried // 8:
            self.is_exhaustive = False
            return
        pace = self.pace(slots, resident)
        for order in copy_orders(len(needed), slots):
            self._try(slots, resident, tuple(needed[index] for index in order))
            if self.best is not None and self.best.step_seconds <= pace * (1 + _EPSILON):
                return
            if self.tried >= self.most_tried:
                self.is_exhaustive = False
                return

    def _exchange(self) -> None:
        """Improve what was best with each number of slots step by step: first exchange that helps, until none does."""
        for start in sorted(self.best_with.values(), key=lambda found: found.step_seconds):
            best: _Tried | None = start
            while best is not None and not self.is_done:
                best = self._first_better(best)

    def _first_better(self, best: _Tried) -> _Tried | None:
        for neighbour in self._neighbours(best):
            if self.tried >= self.most_tried:
                return None
            found = self._try(*neighbour)
            if found.is_better_than(best):
                return found
        return None

    def _neighbours(self, best: _Tried) -> Iterator[tuple[int, frozenset[int], tuple[int, ...]]]:
        # Copies: one goes to another turn nearby. First those at the stages that wait longest.
        for place in sorted(best.order, key=lambda place: -best.waits[place]):
            turn = best.order.index(place)
            rest = best.order[:turn] + best.order[turn + 1 :]
            for target in (turn - 1, turn + 1, turn - 2, turn + 2, turn - 3, turn + 3):
                if 0 <= target <= len(rest):
                    order = (*rest[:target], place, *rest[target:])
                    if is_possible(order, best.slots):
                        yield best.slots, best.resident, order
        # Banks: one that waits changes places with a resident one, or takes the room of several, or of a slot.
        waiting = sorted(best.order, key=lambda place: -best.waits[place])
        for place in waiting:
            for other in sorted(best.resident, key=lambda other: abs(other - place)):
                resident = best.resident - {other} | {place}
                if self.fits(best.slots, resident):
                    yield from self._with_orders(best.slots, resident, best.order)
        for slots in (best.slots, best.slots - 1, best.slots + 1):
            if slots in self.counts:
                for place in waiting:
                    yield from self._with_orders(slots, self._filled(slots, best.resident, place, None), best.order)
                for place in best.resident:
                    yield from self._with_orders(slots, self._filled(slots, best.resident, None, place), best.order)

    def _filled(
        self, slots: int, resident: frozenset[int], entering: int | None, leaving: int | None
    ) -> frozenset[int]:
        """`resident` with one bank more, or one less, and as many of the others as fit then."""
        value = {place: self.stages[place].transfer_seconds / self.stages[place].bank_bytes for place in self.banks}
        changed = resident - {leaving} | ({entering} if entering is not None else set())
        for place in sorted(changed - {entering}, key=value.__getitem__):
            if self.fits(slots, changed):
                break
            changed -= {place}
        for place in sorted(set(self.banks) - changed - {leaving}, key=value.__getitem__, reverse=True):
            if self.fits(slots, changed | {place}):
                changed |= {place}
        return changed

    def _with_orders(
        self, slots: int, resident: frozenset[int], order: tuple[int, ...]
    ) -> Iterator[tuple[int, frozenset[int], tuple[int, ...]]]:
        """The order of need, and the one that follows `order` where it says something."""
        if not self.fits(slots, resident):
            return
        needed = tuple(place for place in self.banks if place not in resident)
        yield slots, resident, needed
        similar = [place for place in order if place not in resident]
        for place in needed:
            if place not in similar:
                similar.insert(next((at for at, other in enumerate(similar) if other > place), len(similar)), place)
        if tuple(similar) != needed and is_possible(similar, slots):
            yield slots, resident, tuple(similar)

    def _found(self) -> FoundSchedule:
        best = self.best
        assert best is not None
        return FoundSchedule(
            slots=min(best.slots, len(best.order)),
            slot_bytes=self.slot_bytes(best.resident),
            resident=tuple(sorted(best.resident)),
            order=best.order,
            step_seconds=best.step_seconds,
            exposed_seconds=max(0.0, best.step_seconds - self.compute_seconds),
            least_exposed_seconds=max(0.0, self.least - self.compute_seconds),
            resident_bytes=self.bytes_of(best.resident),
            tried=self.tried,
            is_exhaustive=self.is_exhaustive,
        )


def is_possible(order: Sequence[int], slots: int) -> bool:
    """Whether `slots` slots can run copies in this order of positions: see `copy_orders`."""
    rank = {place: index for index, place in enumerate(sorted(order))}
    return all(turn < rank[place] + slots for turn, place in enumerate(order))
