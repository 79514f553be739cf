"""Work that no rank has yet, in the order in which ranks will take it.

A level of priority is worth a fixed time of waiting. So the order is that of `arrived - priority · priority_seconds`,
it never changes while time passes, and whoever waits for long enough is first, whatever comes later.
"""

from __future__ import annotations

import heapq

from moepass.runtime.serving.router.open_requests import OpenRequest, Work

_Heap = list[tuple[float, int, int, Work]]


class WaitingQueue:
    """`flops`: of all that waits, without any sharing; `count`: how many pieces of work."""

    def __init__(self, ranks: int) -> None:
        self.flops = 0
        self.count = 0
        self._heap: _Heap = []
        self._parked: list[_Heap] = [[] for _ in range(ranks)]
        self._parked_ranks = 0

    def push(self, work: Work, rank: int | None = None) -> None:
        """Work waits for any rank, or for `rank` alone."""
        of = work.of
        of.waiting_flops += work.flops
        self.flops += work.flops
        self.count += 1
        heap = self._heap
        if rank is not None:
            heap = self._parked[rank]
            self._parked_ranks |= 1 << rank
        # Work of one request is told apart by what it has of it: its first questions are different ones.
        heapq.heappush(heap, (of.key, of.order, work.questions[0].parts[0] if work.questions else 0, work))

    def pop(self, open_ranks: int) -> Work | None:
        """The first piece of work that any of `open_ranks` may have."""
        heap = self._heap
        while True:
            if self._parked_ranks & open_ranks:
                heap = min(self._heaps(open_ranks), key=_first)
            if not heap:
                return None
            work = heapq.heappop(heap)[3]
            of = work.of
            if not of.is_closed:
                of.waiting_flops -= work.flops
                self.flops -= work.flops
                self.count -= 1
                return work

    def unpark(self, rank: int) -> None:
        """What waits for `rank` waits for any."""
        for place in self._parked[rank]:
            heapq.heappush(self._heap, place)
        self._parked[rank] = []
        self._parked_ranks &= ~(1 << rank)

    def close(self, request: OpenRequest, pieces: int) -> None:
        """A request is closed, and `pieces` of it wait. They are dropped when they would come first."""
        self.flops -= request.waiting_flops
        self.count -= pieces
        request.waiting_flops = 0

    def _heaps(self, ranks: int) -> list[_Heap]:
        found = [self._heap]
        for rank, heap in enumerate(self._parked):
            if not heap:
                self._parked_ranks &= ~(1 << rank)
            elif ranks >> rank & 1:
                found.append(heap)
        return found


def _first(heap: _Heap) -> tuple[float, int, int]:
    return heap[0][:3] if heap else (float("inf"), 0, 0)
