"""The life of requests and ranks, as far as every policy shares it: events in, decisions out.

Loads are exact integers: what an assignment adds is a number that it carries, and the same number is taken away when
it is done, withdrawn or lost. Nothing is ever computed a second time to be subtracted.
"""

from __future__ import annotations

import abc
import heapq
import math
from collections.abc import Collection

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.block_tables import BlockTables
from moepass.runtime.serving.router.decisions import Assignment, RankLoss, Round, Withdrawal
from moepass.runtime.serving.router.open_work import Work
from moepass.runtime.serving.router.routable import (
    BlockHash,
    FlopsFormula,
    RoutableRequest,
    RoutedQuestion,
    questions_of,
)
from moepass.runtime.serving.router.waiting_queue import WaitingQueue

ATTEMPTS = 2

# A rank, its leading blocks that need no computation, and the questions that it gets.
Placement = tuple[int, int, tuple[RoutedQuestion, ...]]


class RankRouter(abc.ABC):
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
        self._requests: dict[str, Work] = {}
        self._running: dict[int, Work] = {}
        self._deadlines: list[tuple[float, int, str]] = []
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
    def saturation_flops(self) -> float:
        """A rank with this load or more takes no more."""
        return self._saturation_flops

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
        return tuple(work.assignment for work in self._running.values() if work.assignment)

    # Events of requests

    def submit(self, request: RoutableRequest) -> None:
        if request.id in self._requests:
            raise InputError(f"request {request.id} is there already", name="id", value=request.id)
        self._submitted = order = self._submitted + 1
        place = (request.arrived - request.priority * self._priority_seconds, order, 0)
        prompt_flops = flops = self._flops(0, request.prompt_tokens)
        questions: tuple[RoutedQuestion, ...] = ()
        if request.parts:
            questions = questions_of(request, self._formula)
            flops += _sum(questions)
        work = Work(request, place, prompt_flops, questions, flops)
        self._requests[request.id] = work
        self._queue.push(work)
        if request.deadline != math.inf:
            self._watch_deadline(work)

    def cancel(self, request_id: str) -> Withdrawal | None:
        """None if no such request is open; it may have been done meanwhile."""
        work = self._requests.get(request_id)
        return None if work is None else self._close(work)

    def route(self, now: float) -> Round:
        """One round, at the time `now`: what is over expires, then ranks get work until they take no more."""
        expired = self._expire(now)
        assignments: list[Assignment] = []
        pop = self._queue.pop
        while self._open and (work := pop(self._open)) is not None:
            placements = self._place(work, now)
            if len(placements) == 1:
                rank, blocks, _ = placements[0]
                assignments.append(self._assign(work, rank, blocks))
            elif placements:
                pieces = self._cut(work, placements)
                for piece, (rank, blocks, _) in zip(pieces, placements, strict=True):
                    assignments.append(self._assign(piece, rank, blocks))
        return Round(assignments, expired)

    def started(self, number: int) -> bool:
        """The rank computes it now. False: it was withdrawn or lost, which the rank had not heard of."""
        work = self._running.get(number)
        if work is None:
            return False
        work.is_started = True
        if not self._keeps_blocks and work.promised is not None:
            assert work.assignment
            self._tables.release(work.promised, work.assignment.rank)
            work.promised = None
        return True

    def done(self, number: int) -> int | None:
        """How many pieces of its request are not done; at 0 it is complete.

        None: it was done, withdrawn or lost before, and what the rank answers must be dropped.
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
        del self._requests[work.request.id]
        return 0

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
                self._queue.push(work)
                if work.request.deadline != math.inf:
                    self._watch_deadline(work)
                rerun[work.request.id] = None
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

    def _cut(self, work: Work, placements: tuple[Placement, ...]) -> list[Work]:
        pieces = [work.part(questions) for _, _, questions in placements]
        siblings = work.siblings or [work]
        siblings.remove(work)
        siblings += pieces
        # Its deadline and its id still lead to the whole, and from there to the pieces.
        for one in (work, *pieces):
            one.siblings = siblings
        return pieces

    def _assign(self, work: Work, rank: int, blocks: int) -> Assignment:
        request = work.request
        shared = blocks * BLOCK_TOKENS
        flops = self._flops(shared, request.prompt_tokens - shared)
        parts = None
        if work.questions:
            flops += _sum(work.questions)
            if work.siblings is not None:
                parts = tuple(sorted(part for question in work.questions for part in question.parts))
        self._assigned = number = self._assigned + 1
        work.assignment = assignment = Assignment(number, request.id, rank, parts, shared, flops, work.attempt)
        work.promised = self._tables.promise(request.blocks, rank)
        self._running[number] = work
        self._loads[rank] = load = self._loads[rank] + flops
        if load >= self._saturation_flops:
            self._open &= ~(1 << rank)
        return assignment

    def _release(self, work: Work) -> Assignment:
        """Takes work from its rank, with its load and the blocks that it promised."""
        assignment = work.assignment
        assert assignment
        work.assignment = None
        rank = assignment.rank
        del self._running[assignment.number]
        self._loads[rank] = load = self._loads[rank] - assignment.flops
        if load < self._saturation_flops:
            self._open |= 1 << rank & self._available
        if work.promised is not None:
            self._tables.release(work.promised, rank)
            work.promised = None
        return assignment

    def _close(self, work: Work, lost: Collection[Work] = ()) -> Withdrawal:
        """Ends a request that has no answer, whatever state its work is in; that of `lost` is in none."""
        withdrawn = []
        for one in work.unfinished():
            if one.assignment is not None:
                withdrawn.append(self._release(one))
                one.is_closed = True
            elif one in lost:
                one.is_closed = True
            else:
                self._queue.drop(one)
        if work.siblings is not None:
            work.siblings.clear()
        del self._requests[work.request.id]
        return Withdrawal(work.request.id, tuple(withdrawn))

    def _watch_deadline(self, work: Work) -> None:
        heapq.heappush(self._deadlines, (work.request.deadline, work.place[1], work.request.id))

    def _expire(self, now: float) -> list[Withdrawal]:
        expired = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(deadlines)
            work = self._requests.get(request_id)
            if work is None or work.place[1] != order:
                continue  # it is done; the id may be that of another request by now
            if any(not one.is_started for one in work.unfinished()):
                expired.append(self._close(work))
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


def _sum(questions: tuple[RoutedQuestion, ...]) -> int:
    return sum(question.flops for question in questions)
