"""The state of requests and ranks that all routing policies share: events in, decisions out."""

from __future__ import annotations

import abc
import heapq
import itertools
import math
from collections.abc import Collection

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.block_tables import BlockTables, set_bits
from moepass.runtime.serving.router.routable import (
    Assignment,
    BlockHash,
    FlopsFormula,
    RankLoss,
    Round,
    RoutableRequest,
    Withdrawal,
)
from moepass.runtime.serving.router.waiting_queue import RoutedQuestion, WaitingQueue, Work

ATTEMPTS = 2
# Waiting time after which a request is as urgent as a new one of the next priority.
PRIORITY_SECONDS = 1.0

# A rank, the number of leading blocks that it holds, and the questions that it gets.
RankChoice = tuple[int, int, tuple[RoutedQuestion, ...]]


class RankRouter(abc.ABC):
    """A router without a policy. Subclasses implement `_choose_ranks`, which may also park work in the queue.

    All ranks are available at first. A rank with a load of `saturation_flops` or more gets no more work; infinity
    assigns all work at once. With `keeps_blocks`, ranks have a cache, so later work can use the blocks of running work.
    Without a cache, only work of the same step shares blocks.
    """

    def __init__(
        self, ranks: int, formula: FlopsFormula, *, saturation_flops: float = math.inf, keeps_blocks: bool = True
    ) -> None:
        self._flops = formula.flops
        self.saturation_flops = saturation_flops
        self._keeps_blocks = keeps_blocks
        self.tables = BlockTables()
        self.queue = WaitingQueue(ranks)
        self.requests: dict[str, Work] = {}  # the unanswered ones, in the order of submission
        self._running: dict[int, Work] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._submitted = 0
        self._assigned = 0
        self._loads = [0] * ranks
        # Bit masks of all ranks, of those that are not lost, and of those that are neither lost nor saturated.
        self._all = self._available = self._open = (1 << ranks) - 1

    # State

    @property
    def loads(self) -> tuple[int, ...]:
        """For each rank, the FLOPs of its unfinished assignments, without padding."""
        return tuple(self._loads)

    # Events of requests

    def submit(self, request: RoutableRequest) -> None:
        """Add a request to the queue. No unfinished request has its id."""
        self._submitted = order = self._submitted + 1
        queue_key = (request.arrived - request.priority * PRIORITY_SECONDS, order, 0)
        prompt_flops = flops = self._flops(0, request.prompt_tokens)
        questions: tuple[RoutedQuestion, ...] = ()
        if request.questions:
            questions = tuple(
                RoutedQuestion(question.parts, sum(itertools.starmap(self._flops, question.runs)))
                for question in request.questions
            )
            flops += _total_flops(questions)
        work = Work(request, queue_key, prompt_flops, questions, flops)
        self.requests[request.id] = work
        self.queue.push(work)
        if request.deadline != math.inf:
            self._watch_deadline(work)

    def cancel(self, request_id: str) -> Withdrawal | None:
        """End a request. Return None if it is unknown; it may have been answered already."""
        work = self.requests.get(request_id)
        return None if work is None else self._close(work)

    def route(self, now: float) -> Round:
        """Run one round at the time `now`: expire requests, then assign work until all ranks are saturated."""
        expired = self._expire(now)
        assignments: list[Assignment] = []
        pop = self.queue.pop
        while self._open and (work := pop(self._open)) is not None:
            choices = self._choose_ranks(work, now)
            if len(choices) == 1:
                rank, blocks, _ = choices[0]
                assignments.append(self._assign(work, rank, blocks))
            elif choices:
                shares = self._split_work(work, choices)
                for share, (rank, blocks, _) in zip(shares, choices, strict=True):
                    assignments.append(self._assign(share, rank, blocks))
        return Round(assignments, expired)

    def started(self, number: int) -> bool:
        """Record that the rank computes the assignment. Return False if it was withdrawn or lost before."""
        work = self._running.get(number)
        if work is None:
            return False
        work.is_started = True
        if not self._keeps_blocks and work.promised is not None:
            assert work.assignment
            self.tables.release(work.promised, work.assignment.rank)
            work.promised = None
        return True

    def done(self, number: int) -> int | None:
        """Record that an assignment is answered, and return how many of its siblings are unfinished.

        0 means that the request is complete. None means that the assignment was done, withdrawn or lost before; then
        the answer of the rank must be dropped.
        """
        work = self._running.get(number)
        if work is None:
            return None
        self._release(work)
        work.is_closed = True
        if work.siblings is not None:
            work.siblings.remove(work)
            if work.siblings:
                return len(work.siblings)
        del self.requests[work.request.id]
        return 0

    # Events of ranks

    def block_stored(self, rank: int, block: BlockHash) -> None:
        """Record that the cache of `rank` holds a block and all before it. A rank reports this before `done`."""
        if self._is_available(rank):
            self.tables.store(rank, block)

    def block_evicted(self, rank: int, block: BlockHash) -> None:
        """Record that the cache of `rank` evicted a block. Later blocks of the same prompt are evicted before it."""
        if self._is_available(rank):
            self.tables.evict(rank, block)

    def rank_lost(self, rank: int) -> RankLoss:
        """Requeue the work of `rank`. Requests that have lost a second rank fail."""
        if not self._is_available(rank):
            return RankLoss((), ())
        self._available &= ~(1 << rank)
        self._open &= self._available
        self.tables.forget(rank)
        self.queue.unpark(rank)
        lost = [work for work in self._running.values() if work.assignment and work.assignment.rank == rank]
        for work in lost:
            self._release(work)
        failing = {work.request.id: work for work in lost if work.attempt >= ATTEMPTS}
        unplaced = set(lost)
        failed = tuple(self._close(work, unplaced) for work in failing.values())
        rerun: dict[str, None] = {}
        for work in lost:
            if not work.is_closed:
                work.attempt += 1
                work.is_started = False
                self.queue.push(work)
                if work.request.deadline != math.inf:
                    self._watch_deadline(work)
                rerun[work.request.id] = None
        return RankLoss(tuple(rerun), failed)

    def rank_back(self, rank: int) -> None:
        """Record that `rank` takes work again, with an empty cache."""
        if not self._is_available(rank):
            self._available |= 1 << rank
            self._open |= 1 << rank  # its load was removed when it was lost

    # Policy and bookkeeping

    @abc.abstractmethod
    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        """Return the ranks that get `work`, with each question once. Nothing if the work was parked in the queue."""

    def _split_work(self, work: Work, choices: tuple[RankChoice, ...]) -> list[Work]:
        shares = [work.with_questions(questions) for _, _, questions in choices]
        siblings = work.siblings or [work]
        siblings.remove(work)
        siblings += shares
        # The deadline and the id still refer to the unsplit work, which leads to the shares.
        for sibling in (work, *shares):
            sibling.siblings = siblings
        return shares

    def _assign(self, work: Work, rank: int, blocks: int) -> Assignment:
        request = work.request
        shared = blocks * BLOCK_TOKENS
        flops = self._flops(shared, request.prompt_tokens - shared)
        parts = None
        if work.questions:
            flops += _total_flops(work.questions)
            if work.siblings is not None:
                parts = tuple(sorted(part for question in work.questions for part in question.parts))
        self._assigned = number = self._assigned + 1
        work.assignment = assignment = Assignment(number, request.id, rank, parts, flops)
        work.promised = self.tables.promise(request.blocks, rank)
        self._running[number] = work
        self._loads[rank] = load = self._loads[rank] + flops
        if load >= self.saturation_flops:
            self._open &= ~(1 << rank)
        return assignment

    def _release(self, work: Work) -> Assignment:
        """Take work from its rank, and subtract its load and pending blocks."""
        assignment = work.assignment
        assert assignment
        work.assignment = None
        rank = assignment.rank
        del self._running[assignment.number]
        self._loads[rank] = load = self._loads[rank] - assignment.flops
        if load < self.saturation_flops:
            self._open |= 1 << rank & self._available
        if work.promised is not None:
            self.tables.release(work.promised, rank)
            work.promised = None
        return assignment

    def _close(self, work: Work, lost: Collection[Work] = ()) -> Withdrawal:
        """End a request without an answer.

        Work in `lost` was taken from its rank and has not been queued again, so it is only marked as closed.
        """
        withdrawn = []
        for unfinished in work.unfinished():
            if unfinished.assignment is not None:
                withdrawn.append(self._release(unfinished))
                unfinished.is_closed = True
            elif unfinished in lost:
                unfinished.is_closed = True
            else:
                self.queue.drop(unfinished)
        if work.siblings is not None:
            work.siblings.clear()
        del self.requests[work.request.id]
        return Withdrawal(work.request.id, tuple(withdrawn))

    def _watch_deadline(self, work: Work) -> None:
        heapq.heappush(self._deadlines, (work.request.deadline, work.queue_key[1], work.request.id))

    def _expire(self, now: float) -> list[Withdrawal]:
        expired = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(deadlines)
            work = self.requests.get(request_id)
            if work is None or work.queue_key[1] != order:
                continue  # the request is done, and another one may have its id by now
            if any(not unfinished.is_started for unfinished in work.unfinished()):
                expired.append(self._close(work))
        return expired

    def _is_available(self, rank: int) -> bool:
        return bool(self._available >> rank & 1)

    def _least_loaded(self, ranks: int) -> int:
        """Return the rank of the mask `ranks` with the smallest load, the first of several."""
        if not ranks & (ranks - 1):
            return ranks.bit_length() - 1
        loads = self._loads
        if ranks == self._open and self._available == self._all:
            return loads.index(min(loads))  # saturated ranks have a higher load than open ones
        return min(set_bits(ranks), key=loads.__getitem__)


def _total_flops(questions: tuple[RoutedQuestion, ...]) -> int:
    return sum(question.flops for question in questions)
