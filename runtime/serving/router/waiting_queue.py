"""Work that no rank has yet, in the order in which ranks will take it.

A level of priority is worth a fixed time of waiting. So the order is that of `arrived - priority · priority_seconds`,
it never changes while time passes, and whoever waits for long enough is first, whatever comes later.
"""

from __future__ import annotations

import collections
import heapq

from moepass.runtime.serving.router.open_requests import OpenRequest, Work

# Of work of one request, which has one place in the order, the last number tells which part of it this is.
_Place = tuple[float, int, int]
_Heap = list[tuple[_Place, Work]]


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

    def push(self, work: Work, rank: int | None = None) -> None:
        """Work waits for any rank, or for `rank` alone."""
        of = work.of
        of.waiting_flops += work.flops
        self.flops += work.flops
        self.count += 1
        if rank is not None:
            heapq.heappush(self._parked[rank], (_place(work), work))
            self._parked_ranks |= 1 << rank
        elif not self._line or (self._line[-1].of.key <= of.key and work.attempt == 1):
            self._line.append(work)
        else:
            heapq.heappush(self._heap, (_place(work), work))

    def pop(self, open_ranks: int) -> Work | None:
        """The first piece of work that any of `open_ranks` may have."""
        while True:
            if self._heap or self._parked_ranks & open_ranks:
                work = self._pop_first(open_ranks)
            elif self._line:
                work = self._line.popleft()
            else:
                return None
            of = work.of
            if not of.is_closed:
                of.waiting_flops -= work.flops
                self.flops -= work.flops
                self.count -= 1
                return work

    def unpark(self, rank: int) -> None:
        """What waits for `rank` waits for any."""
        for parked in self._parked[rank]:
            heapq.heappush(self._heap, parked)
        self._parked[rank] = []
        self._parked_ranks &= ~(1 << rank)

    def close(self, request: OpenRequest, pieces: int) -> None:
        """A request is closed, and `pieces` of it wait. They are dropped when they would come first."""
        self.flops -= request.waiting_flops
        self.count -= pieces
        request.waiting_flops = 0

    def _pop_first(self, open_ranks: int) -> Work:
        heaps = [(self._heap[0][0], self._heap)] if self._heap else []
        for rank, parked in enumerate(self._parked):
            if parked and open_ranks >> rank & 1:
                heaps.append((parked[0][0], parked))
        place, heap = min(heaps)
        if self._line and _place(self._line[0]) < place:
            return self._line.popleft()
        work = heapq.heappop(heap)[1]
        self._parked_ranks = sum(1 << rank for rank, parked in enumerate(self._parked) if parked)
        return work


def _place(work: Work) -> _Place:
    return work.of.key, work.of.order, work.questions[0].parts[0] if work.questions else 0
