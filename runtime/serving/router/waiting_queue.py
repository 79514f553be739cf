"""Work that no rank has yet, in the order in which ranks will take it.

A level of priority is worth a fixed time of waiting. So the order is that of `arrived - priority · priority_seconds`,
it never changes while time passes, and whoever waits for long enough is first, whatever comes later. Work that waits
for a saturated rank stays in this order for that rank; for others it stands back by its patience, no further.
"""

from __future__ import annotations

import collections
import heapq
import itertools

from moepass.runtime.serving.router.open_work import Place, Work

# Entries are numbered: one of work that was taken elsewhere stays, and a part of that work may come to the same place.
_Heap = list[tuple[Place, int, Work]]


class WaitingQueue:
    """`flops`: of all that waits, without any sharing; `count`: how many pieces of work."""

    def __init__(self, ranks: int) -> None:
        self.flops = 0
        self.count = 0
        # Nearly all work comes after what is there. It stands in a line, which costs nothing to sort.
        self._line: collections.deque[Work] = collections.deque()
        self._heap: _Heap = []
        self._parked: list[_Heap] = [[] for _ in range(ranks)]
        self._parked_ranks = 0
        # The same work once more, by its place for ranks that it does not wait for.
        self._patient: _Heap = []
        self._numbers = itertools.count()

    def push(self, work: Work) -> None:
        self._count(work)
        if not self._line or self._line[-1].place < work.place:
            self._line.append(work)
        else:
            self._add(self._heap, work.place, work)

    def park(self, work: Work, rank: int, patience_seconds: float | None) -> None:
        """Work waits for `rank`, and others get it only in the place of what comes so much later; None: never."""
        self._count(work)
        work.is_parked = True
        work.may_wait = False
        key, order, part = work.place
        self._add(self._parked[rank], work.place, work)
        self._parked_ranks |= 1 << rank
        if patience_seconds is not None:
            self._add(self._patient, (key + patience_seconds, order, part), work)

    def pop(self, open_ranks: int) -> Work | None:
        """The first piece of work that any of `open_ranks` may have."""
        while True:
            if self._heap or self._patient or self._parked_ranks & open_ranks:
                work = self._pop_first(open_ranks)
            else:
                work = self._line.popleft() if self._line else None
            if work is None:
                return None
            if not work.is_closed:
                work.is_parked = False
                self.flops -= work.flops
                self.count -= 1
                return work

    def unpark(self, rank: int) -> None:
        """What waits for `rank` waits for any."""
        for place, _, work in self._parked[rank]:
            if work.is_parked:
                work.is_parked = False
                self._add(self._heap, place, work)
        self._parked[rank] = []
        self._parked_ranks &= ~(1 << rank)

    def drop(self, work: Work) -> None:
        """Work that waits is over; it leaves its place when that comes first."""
        work.is_closed = True
        self.flops -= work.flops
        self.count -= 1

    def _add(self, heap: _Heap, place: Place, work: Work) -> None:
        heapq.heappush(heap, (place, next(self._numbers), work))

    def _count(self, work: Work) -> None:
        self.flops += work.flops
        self.count += 1

    def _pop_first(self, open_ranks: int) -> Work | None:
        best = self._heap
        patient = _without_taken(self._patient)
        if patient and (not best or patient[0][0] < best[0][0]):
            best = patient
        ranks = self._parked_ranks & open_ranks
        while ranks:
            bit = ranks & -ranks
            ranks ^= bit
            parked = _without_taken(self._parked[bit.bit_length() - 1])
            if not parked:
                self._parked_ranks ^= bit
            elif not best or parked[0][0] < best[0][0]:
                best = parked
        line = self._line
        if line and (not best or line[0].place < best[0][0]):
            return line.popleft()
        return heapq.heappop(best)[-1] if best else None


def _without_taken(heap: _Heap) -> _Heap:
    """The heap; at its top what was closed, or taken from elsewhere, is dropped."""
    while heap:
        first = heap[0][-1]
        if first.is_parked and not first.is_closed:
            break
        heapq.heappop(heap)
    return heap
