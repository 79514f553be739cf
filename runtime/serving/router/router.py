"""The life of requests and ranks, as far as every policy shares it: events in, decisions out.

Loads are exact integers: what an assignment adds is a number that it carries, and the same number is taken away when
it is done, withdrawn or lost. Nothing is ever computed a second time to be subtracted.
"""

from __future__ import annotations

import abc
import heapq
import math

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.block_tables import BlockTables
from moepass.runtime.serving.router.decisions import Assignment, RankLoss, Round, Withdrawal
from moepass.runtime.serving.router.open_requests import OpenRequest, Place, Work
from moepass.runtime.serving.router.routable import BlockHash, FlopsFormula, Question, RoutableRequest, questions_of
from moepass.runtime.serving.router.waiting_queue import WaitingQueue

ATTEMPTS = 2

# A rank, its leading blocks that need no computation, and the questions that it gets.
Placement = tuple[int, int, tuple[Question, ...]]


class Router(abc.ABC):
    """What a policy adds is `_place`, which may park work in the queue.

    Args:
        ranks: how many; all are there at the beginning.
        formula: what tokens cost.
        saturation_flops: a rank with this load or more takes no more. Infinity: ranks take all there is at once.
        priority_seconds: how long a request waits until it is as urgent as a new one of the next priority.
        keeps_blocks: ranks have a cache, so that blocks of work that is under way will be there for later work too.
            Without a cache only work of the same step shares anything.

    Raises:
        InputError: no rank, a threshold that is not positive, or negative `priority_seconds`. Events raise it for a
            rank that is not there, and for a request whose id another one has that is not done.
    """

    def __init__(
        self,
        ranks: int,
        formula: FlopsFormula,
        *,
        saturation_flops: float = math.inf,
        priority_seconds: float = 1.0,
        keeps_blocks: bool = True,
    ) -> None:
        if ranks < 1:
            raise InputError.wrong("ranks", ranks, "at least 1")
        if not saturation_flops > 0:
            raise InputError.wrong("saturation_flops", saturation_flops, "above 0")
        if not (priority_seconds >= 0 and math.isfinite(priority_seconds)):
            raise InputError.wrong("priority_seconds", priority_seconds, "a number of at least 0")
        self._flops = formula.flops
        self._formula = formula
        self._saturation_flops = saturation_flops
        self._priority_seconds = priority_seconds
        self._keeps_blocks = keeps_blocks
        self._tables = BlockTables()
        self._queue = WaitingQueue(ranks)
        self._requests: dict[str, OpenRequest] = {}
        self._running: dict[int, Work] = {}
        self._deadlines: list[tuple[float, Place, OpenRequest]] = []
        self._submitted = 0
        self._assigned = 0
        self._loads = [0] * ranks
        # Bits of the ranks that are there, and of those among them that are not saturated.
        self._all = self._available = self._open = (1 << ranks) - 1

    # What is known

    @property
    def loads(self) -> tuple[int, ...]:
        """Of each rank, true FLOPs of what was assigned to it and is not done."""
        return tuple(self._loads)

    @property
    def waiting_flops(self) -> int:
        """Of all that no rank has yet, without any sharing: the most that it can cost."""
        return self._queue.flops

    @property
    def waiting(self) -> int:
        """How many requests, or parts of requests that were lost, no rank has yet."""
        return self._queue.count

    @property
    def tables(self) -> BlockTables:
        return self._tables

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that have no answer yet, in the order of their submission."""
        return tuple(self._requests)

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """Those that are not done, in the order in which they were made."""
        return tuple(work.assignment for work in self._running.values())

    # Events of requests

    def submit(self, request: RoutableRequest) -> None:
        if request.id in self._requests:
            raise InputError(f"request {request.id} is there already", name="id", value=request.id)
        self._submitted = order = self._submitted + 1
        key = request.arrived - request.priority * self._priority_seconds
        questions = questions_of(request, self._formula) if request.parts else ()
        prompt_flops = self._flops(0, request.prompt_tokens)
        entry = OpenRequest(request, (key, order, 0), prompt_flops, questions)
        self._requests[request.id] = entry
        self._queue.push(Work(entry, questions, 1, prompt_flops + _sum(questions) if questions else prompt_flops))
        self._watch_deadline(entry)

    def cancel(self, request_id: str) -> Withdrawal | None:
        """None if no such request is open; it may have been done meanwhile."""
        entry = self._requests.get(request_id)
        return None if entry is None else self._close(entry)

    def route(self, now: float) -> Round:
        """One round, at the time `now`: what is over expires, then ranks get work until they take no more."""
        expired = self._expire(now)
        assignments: list[Assignment] = []
        pop = self._queue.pop
        while self._open and (work := pop(self._open)) is not None:
            placements = self._place(work, now)
            if placements:
                more = len(placements) - 1
                if more:
                    work.of.unfinished += more
                    work.of.unstarted += more
                for placement in placements:
                    assignments.append(self._assign(work, placement))
        return Round(assignments, expired)

    def started(self, number: int) -> bool:
        """The rank computes it now. False: it was withdrawn or lost, which the rank had not heard of."""
        work = self._running.get(number)
        if work is None:
            return False
        if not work.is_started:
            work.is_started = True
            work.of.unstarted -= 1
            if not self._keeps_blocks:
                self._tables.release(work.promised, work.assignment.rank)
                work.promised = None
        return True

    def done(self, number: int) -> int | None:
        """How many pieces of its request are not done; at 0 it is complete.

        None: it was done, withdrawn or lost before, and what the rank answers must be dropped.
        """
        work = self._running.pop(number, None)
        if work is None:
            return None
        self._release(work)
        entry = work.of
        if not entry.unfinished:
            entry.is_closed = True
            del self._requests[entry.request.id]
        return entry.unfinished

    # Events of ranks

    def block_stored(self, rank: int, block: BlockHash) -> None:
        """`rank` can take a block, and all before it, from its cache. It says so before it says that work is done."""
        if self._is_available(rank):
            self._tables.store(rank, block)

    def block_evicted(self, rank: int, block: BlockHash) -> None:
        """`rank` holds a block no more. Blocks behind it, which are of no use without it, are evicted before it."""
        if self._is_available(rank):
            self._tables.evict(rank, block)

    def rank_lost(self, rank: int) -> RankLoss:
        """What it had runs once more, or has failed if that was its second rank."""
        if not self._is_available(rank):
            return RankLoss((), ())
        self._available &= ~(1 << rank)
        self._open &= self._available
        self._tables.forget(rank)
        self._queue.unpark(rank)
        lost = [work for work in self._running.values() if work.assignment.rank == rank]
        for work in lost:
            self._withdraw(work)
        failing = {work.of.place: work.of for work in lost if work.attempt >= ATTEMPTS}
        failed = tuple(self._close(entry) for entry in failing.values())
        rerun: dict[str, None] = {}
        for work in lost:
            if not work.of.is_closed:
                self._run_again(work)
                rerun[work.of.request.id] = None
        return RankLoss(tuple(rerun), failed)

    def rank_back(self, rank: int) -> None:
        """It takes work again; its cache is empty."""
        if not self._is_available(rank):
            self._available |= 1 << rank
            self._open |= 1 << rank  # what it had was taken away when it was lost

    # Inside

    @abc.abstractmethod
    def _place(self, work: Work, now: float) -> tuple[Placement, ...]:
        """Which ranks get `work`: all of it, every question once. Nothing: it is parked in the queue."""

    def _assign(self, work: Work, placement: Placement) -> Assignment:
        rank, blocks, questions = placement
        entry = work.of
        request = entry.request
        shared = blocks * BLOCK_TOKENS
        flops = self._flops(shared, request.prompt_tokens - shared)
        parts = None
        if questions:
            flops += _sum(questions)
            if len(questions) < len(entry.questions):
                parts = tuple(sorted(part for question in questions for part in question.parts))
            if questions is not work.questions:
                work = Work(entry, questions, work.attempt, entry.prompt_flops + _sum(questions))
        self._assigned = number = self._assigned + 1
        assignment = Assignment(number, request.id, rank, parts, shared, flops, work.attempt)
        work.assignment = assignment
        work.promised = self._tables.promise(request.blocks, rank)
        self._running[number] = work
        entry.running += (work,)
        self._loads[rank] = load = self._loads[rank] + flops
        if load >= self._saturation_flops:
            self._open &= ~(1 << rank)
        return assignment

    def _release(self, work: Work) -> None:
        """Takes work from a rank, with its load and the blocks that it promised; it is no part of its request then."""
        assignment = work.assignment
        rank = assignment.rank
        self._loads[rank] = load = self._loads[rank] - assignment.flops
        if load < self._saturation_flops:
            self._open |= 1 << rank & self._available
        if work.promised is not None:
            self._tables.release(work.promised, rank)
        entry = work.of
        entry.unfinished -= 1
        if not work.is_started:
            entry.unstarted -= 1
        others = entry.running
        entry.running = tuple(one for one in others if one is not work) if len(others) > 1 else ()

    def _withdraw(self, work: Work) -> None:
        del self._running[work.assignment.number]
        self._release(work)

    def _run_again(self, work: Work) -> None:
        entry = work.of
        entry.unfinished += 1
        entry.unstarted += 1
        self._queue.push(Work(entry, work.questions, work.attempt + 1, work.flops))
        self._watch_deadline(entry)

    def _watch_deadline(self, entry: OpenRequest) -> None:
        if entry.request.deadline != math.inf:
            heapq.heappush(self._deadlines, (entry.request.deadline, entry.place, entry))

    def _close(self, entry: OpenRequest) -> Withdrawal:
        """Ends a request that has no answer, whatever state it is in."""
        entry.is_closed = True
        del self._requests[entry.request.id]
        running = entry.running
        self._queue.close(entry, entry.unfinished - len(running))
        for work in running:
            self._withdraw(work)
        return Withdrawal(entry.request.id, tuple(work.assignment for work in running))

    def _expire(self, now: float) -> list[Withdrawal]:
        expired = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            entry = heapq.heappop(deadlines)[2]
            if entry.unstarted and not entry.is_closed:
                expired.append(self._close(entry))
        return expired

    def _is_available(self, rank: int) -> bool:
        if not 0 <= rank < len(self._loads):
            raise InputError(
                f"there is no rank {rank}; ranks are 0 to {len(self._loads) - 1}",
                name="rank",
                value=rank,
                expected=range(len(self._loads)),
                rank=rank,
            )
        return bool(self._available >> rank & 1)

    def _least_loaded(self, ranks: int) -> int:
        """The one of `ranks` with the smallest load; the first of equals."""
        if not ranks & (ranks - 1):
            return ranks.bit_length() - 1
        loads = self._loads
        if ranks == self._open and self._available == self._all:
            return loads.index(min(loads))  # an open rank: the others are saturated, so they have more
        return min(bits(ranks), key=loads.__getitem__)


def bits(mask: int) -> list[int]:
    """The places of the bits of `mask`, ascending."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]


def _sum(questions: tuple[Question, ...]) -> int:
    return sum(question.flops for question in questions)
