"""Work, which is a request or a part of it, and the queue of unassigned work.

Work that is parked for a saturated rank keeps its order for that rank. For other ranks it is delayed by its patience.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from typing import NamedTuple

from moepass.runtime.serving.router.block_tables import PendingRun
from moepass.runtime.serving.router.routable import Assignment, RoutableRequest

# Order in the queue: effective time of arrival, number of the submission, and index of the first part. The last one
# distinguishes work of the same request.
QueueKey = tuple[float, int, int]


class RoutedQuestion(NamedTuple):
    """The parts of a question, and their total FLOPs, which do not depend on whether the prompt is cached."""

    parts: tuple[int, ...]
    flops: int


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """A request, or its prompt and some of its questions. It waits in the queue, or a rank has it as `assignment`.

    Attributes:
        flops: FLOPs without any sharing.
        siblings: all unfinished work of a request that was split, this work included; the siblings share the list. None
            if the request was not split.
        promised: the pending blocks of the assignment.
        may_wait: it has not been parked yet. Work is parked for a saturated rank at most once.
    """

    request: RoutableRequest
    queue_key: QueueKey
    prompt_flops: int
    questions: tuple[RoutedQuestion, ...]
    flops: int
    attempt: int = 1
    siblings: list[Work] | None = None
    assignment: Assignment | None = None
    promised: PendingRun | None = None
    is_started: bool = False
    may_wait: bool = True
    is_parked: bool = False
    is_closed: bool = False

    def with_questions(self, questions: tuple[RoutedQuestion, ...]) -> Work:
        """Return some of its questions as separate work."""
        flops = self.prompt_flops + sum(question.flops for question in questions)
        queue_key = (*self.queue_key[:2], questions[0].parts[0])
        return Work(self.request, queue_key, self.prompt_flops, questions, flops, self.attempt)

    def unfinished(self) -> list[Work]:
        """Return all unfinished work of the request."""
        if self.siblings is not None:
            return list(self.siblings)
        return [] if self.is_closed else [self]


# Entries are numbered, because an entry of work that was taken from another heap stays here, and a share of that work
# may be pushed with the same key.
_Heap = list[tuple[QueueKey, int, Work]]


class WaitingQueue:
    """Unassigned work in order; its FLOPs without any sharing are an upper bound of its cost."""

    def __init__(self, ranks: int) -> None:
        self.flops = 0
        self.count = 0
        # Nearly all work is pushed in order. It goes to a deque, which needs no sorting.
        self._line: collections.deque[Work] = collections.deque()
        self._heap: _Heap = []
        self._parked: list[_Heap] = [[] for _ in range(ranks)]
        self._parked_ranks = 0
        # Parked work once more, by its key for the ranks that it is not parked for.
        self._patient: _Heap = []
        self._numbers = itertools.count()

    def push(self, work: Work) -> None:
        """Add work to the queue."""
        self._count(work)
        if not self._line or self._line[-1].queue_key < work.queue_key:
            self._line.append(work)
        else:
            self._add(self._heap, work.queue_key, work)

    def park(self, work: Work, rank: int, patience_seconds: float | None) -> None:
        """Add work for `rank`. For others it arrives `patience_seconds` later; with None, they never get it."""
        self._count(work)
        work.is_parked = True
        work.may_wait = False
        key, order, first_part = work.queue_key
        self._add(self._parked[rank], work.queue_key, work)
        self._parked_ranks |= 1 << rank
        if patience_seconds is not None:
            self._add(self._patient, (key + patience_seconds, order, first_part), work)

    def pop(self, open_ranks: int) -> Work | None:
        """Remove and return the first work that a rank of the mask `open_ranks` may get; None if no such work waits."""
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
        """Let the work that is parked for `rank` go to any rank."""
        for queue_key, _, work in self._parked[rank]:
            if work.is_parked:
                work.is_parked = False
                self._add(self._heap, queue_key, work)
        self._parked[rank] = []
        self._parked_ranks &= ~(1 << rank)

    def drop(self, work: Work) -> None:
        """Close waiting work. Its entry is removed when it comes first."""
        work.is_closed = True
        self.flops -= work.flops
        self.count -= 1

    def _add(self, heap: _Heap, queue_key: QueueKey, work: Work) -> None:
        heapq.heappush(heap, (queue_key, next(self._numbers), work))

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
        if line and (not best or line[0].queue_key < best[0][0]):
            return line.popleft()
        return heapq.heappop(best)[-1] if best else None


def _without_taken(heap: _Heap) -> _Heap:
    """Remove closed and taken work from the top of `heap`, and return the heap."""
    while heap:
        first = heap[0][-1]
        if first.is_parked and not first.is_closed:
            break
        heapq.heappop(heap)
    return heap
