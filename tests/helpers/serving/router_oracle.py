"""The expected state and decisions of a router, computed with lists and loops, without tables and shortcuts.

The oracle receives the same events. It recomputes loads, promised blocks and every decision of a round from the open
requests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from moepass.runtime.serving.router.routable import Assignment, BlockHash, Round, RoutableQuestion, RoutableRequest
from moepass.runtime.serving.router.router import PRIORITY_SECONDS, RankRouter

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class LinearAndPairs:
    """FLOPs of tokens, and of the pairs of a token and one that it sees."""

    per_token: int = 3
    per_pair: int = 2

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        pairs = new_tokens * prefix_tokens + new_tokens * (new_tokens + 1) // 2
        return self.per_token * new_tokens + self.per_pair * pairs


def assignments_of(router: RankRouter) -> tuple[Assignment, ...]:
    """Return the unfinished assignments, in the order of their creation."""
    return tuple(work.assignment for work in router._running.values() if work.assignment)


def questions_of(prompt_tokens: int, tree: Sequence[tuple[int, int]]) -> tuple[RoutableQuestion, ...]:
    """Return the questions of a tree of parts behind a prompt, given the parent and the tokens of each part."""

    def root(part: int) -> int:
        return part if tree[part][0] < 0 else root(tree[part][0])

    def end(part: int) -> int:
        return prompt_tokens if part < 0 else end(tree[part][0]) + tree[part][1]

    groups = [[part for part in range(len(tree)) if root(part) == first] for first in range(len(tree))]
    return tuple(
        RoutableQuestion(tuple(parts), tuple((end(tree[part][0]), tree[part][1]) for part in parts))
        for parts in groups
        if parts
    )


@dataclasses.dataclass(eq=False)
class Piece:
    """All of a request or some of its questions: it waits (no assignment), or a rank has it."""

    request: RoutableRequest
    order: int
    questions: tuple[int, ...]
    attempt: int = 1
    assignment: Assignment | None = None
    is_started: bool = False
    # The saturated rank that the piece waits for, how long later pieces wait behind it, and whether it may wait.
    waits_for: int | None = None
    patience: float = math.inf
    may_wait: bool = True


class RouterOracle:
    def __init__(
        self,
        ranks: int,
        formula: LinearAndPairs,
        *,
        saturation_flops: float,
        flops_per_second: float,
        keeps_blocks: bool,
        most_passed_over: int,
    ) -> None:
        self.ranks = ranks
        self.formula = formula
        self.saturation = saturation_flops
        self.rate = flops_per_second
        self.keeps_blocks = keeps_blocks
        self.most_passed_over = most_passed_over
        self.available = set(range(ranks))
        self.blocks: dict[int, set[BlockHash]] = {rank: set() for rank in range(ranks)}
        self.pieces: list[Piece] = []

    # State

    def loads(self) -> tuple[int, ...]:
        return tuple(sum(piece.assignment.flops for piece in self._on(rank)) for rank in range(self.ranks))

    def pending(self) -> dict[BlockHash, dict[int, int]]:
        pending: dict[BlockHash, dict[int, int]] = collections.defaultdict(lambda: collections.defaultdict(int))
        for rank in range(self.ranks):
            for piece in self._promising(rank):
                for block in piece.request.blocks:
                    pending[block][rank] += 1
        return {block: dict(counts) for block, counts in pending.items()}

    def committed(self) -> dict[BlockHash, int]:
        committed: dict[BlockHash, int] = collections.defaultdict(int)
        for rank, blocks in self.blocks.items():
            for block in blocks:
                committed[block] += 1 << rank
        return dict(committed)

    def open_ids(self) -> set[str]:
        return {piece.request.id for piece in self.pieces}

    def waiting(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.assignment is None]

    def waiting_flops(self) -> int:
        return sum(self._cost(piece.request, 0, piece.questions) for piece in self.waiting())

    def running(self) -> dict[int, Piece]:
        return {piece.assignment.number: piece for piece in self.pieces if piece.assignment}

    # Events

    def submit(self, request: RoutableRequest, order: int) -> None:
        self._push(request, order, self.questions(request))

    def end(self, request_id: str) -> list[Assignment]:
        ended = [piece for piece in self.pieces if piece.request.id == request_id]
        self.pieces = [piece for piece in self.pieces if piece.request.id != request_id]
        return [piece.assignment for piece in ended if piece.assignment]

    def done(self, number: int) -> int | None:
        piece = self.running().get(number)
        if piece is None:
            return None
        self.pieces.remove(piece)
        return sum(open_piece.request is piece.request for open_piece in self.pieces)

    def lose(self, rank: int) -> tuple[set[str], set[str]]:
        """Ids of requests that run again, and of those that have failed."""
        if rank not in self.available:
            return set(), set()
        self.available.remove(rank)
        self.blocks[rank] = set()
        lost = self._on(rank)
        failed = {piece.request.id for piece in lost if piece.attempt == 2}
        for request_id in failed:
            self.end(request_id)
        again = [piece for piece in lost if piece.request.id not in failed]
        for piece in sorted(again, key=lambda piece: piece.assignment.number):
            self.pieces.remove(piece)
            self._push(piece.request, piece.order, piece.questions, piece.attempt + 1)
            self.pieces[-1].may_wait = piece.may_wait
        for piece in self.waiting():
            piece.waits_for = None if piece.waits_for == rank else piece.waits_for
        return {piece.request.id for piece in again}, failed

    # Decisions

    def check_round(self, made: Round, now: float, *, is_prefix_router: bool) -> None:
        """Every decision of a round, in order; the assignments become known here."""
        late = {piece.request.id for piece in self.pieces if not piece.is_started and piece.request.deadline <= now}
        assert {withdrawal.request_id for withdrawal in made.expired} == late
        assert len(made.expired) == len(late)
        for withdrawal in made.expired:
            assert sorted(withdrawal.assignments) == sorted(self.end(withdrawal.request_id))
        left = list(made.assignments)
        self.passed_over = 0
        while unsaturated := self._unsaturated():
            places = [(self._place(piece, unsaturated), piece) for piece in self.waiting()]
            key, piece = min(places, key=lambda both: both[0], default=((math.inf, 0, ()), None))
            if piece is None or key[0] == math.inf:
                break
            piece.waits_for = None
            if is_prefix_router:
                expected = self._placements(piece, unsaturated, now)
            else:
                expected = [(left[0].rank, piece.questions)]
            if expected:
                self._take(piece, expected, left)
        assert not left
        self._check_loads(made.assignments)

    def _take(self, piece: Piece, expected: list[tuple[int, tuple[int, ...]]], left: list[Assignment]) -> None:
        self.pieces.remove(piece)
        request = piece.request
        before = {rank: self.matched(request, rank) for rank, _ in expected}
        for rank, questions in expected:
            made = left.pop(0)
            assert (made.request_id, made.rank) == (request.id, rank)
            parts = tuple(sorted(index for question in questions for index in request.questions[question].parts))
            assert made.parts == (None if questions == self.questions(request) else parts)
            assert made.flops == self._cost(request, before[rank], questions)
            again = Piece(request, piece.order, questions, piece.attempt, made)
            again.may_wait = piece.may_wait or len(expected) > 1
            self.pieces.append(again)

    def _placements(self, piece: Piece, unsaturated: list[int], now: float) -> list[tuple[int, tuple[int, ...]]]:
        request, questions = piece.request, piece.questions
        loads = self.loads()

        def prompt(rank: int) -> int:
            return self._cost(request, self.matched(request, rank), ())

        first = min(unsaturated, key=lambda rank: (prompt(rank), loads[rank], rank))
        holder = min(self.available, key=lambda rank: (prompt(rank), loads[rank], rank))
        again = prompt(first) - prompt(holder)
        seconds = loads[holder] / self.rate
        in_time = now + seconds + self._cost(request, self.matched(request, holder), questions) / self.rate
        is_late = request.deadline < math.inf and in_time > request.deadline
        if again > 0 and piece.may_wait and not is_late and self.passed_over < self.most_passed_over:
            self.passed_over += 1
            piece.may_wait = False
            piece.waits_for = holder
            piece.patience = math.inf if again > loads[holder] else seconds
            return []
        remaining = [(first, questions)]
        total = sum(self._question_cost(request, question) for question in questions)
        base = {rank: loads[rank] + prompt(rank) for rank in unsaturated}
        if len(questions) < 2 or base[first] + total <= self.saturation:
            return remaining
        ranks, end = [first], base[first] + total
        for rank in sorted(set(unsaturated) - {first}, key=lambda rank: (base[rank], rank)):
            level = max(self._level([base[assigned] for assigned in (*ranks, rank)], total), self.saturation)
            if prompt(rank) < end - level:
                ranks, end = [*ranks, rank], level
        shares = self._shares(request, questions, [base[rank] for rank in ranks], end)
        placed = [(rank, share) for rank, share in zip(ranks, shares, strict=True) if share]
        ends = [
            base[rank] + sum(self._question_cost(request, question) for question in share) for rank, share in placed
        ]
        saved = base[first] + total - max(*ends, self.saturation)
        return placed if sum(prompt(rank) for rank, _ in placed[1:]) < saved else remaining

    def _level(self, loads: list[int], total: int) -> int:
        """Return the smallest load up to which the ranks together can take `total`."""
        low, high = 0, max(loads) + total
        while low < high:
            middle = (low + high) // 2
            if sum(max(0, middle - load) for load in loads) >= total:
                high = middle
            else:
                low = middle + 1
        return low

    def _shares(
        self, request: RoutableRequest, questions: tuple[int, ...], loads: list[int], level: int
    ) -> list[tuple[int, ...]]:
        left = list(questions)
        shares: list[list[int]] = [[] for _ in loads]
        surplus = 0
        for share, load in zip(shares[:-1], loads[:-1], strict=True):
            room = level - load + surplus
            while left and (not share or room > self._question_cost(request, left[0]) / 2):
                room -= self._question_cost(request, left[0])
                share.append(left.pop(0))
            surplus = room
        shares[-1] = left
        return [tuple(share) for share in shares]

    def _check_loads(self, made: Iterable[Assignment]) -> None:
        """Check that ranks got their last assignment below the threshold, and that no rank below it has room."""
        last = {assignment.rank: assignment.flops for assignment in made}
        loads = self.loads()
        for rank, flops in last.items():
            assert loads[rank] - flops < self.saturation
        if any(piece.waits_for is None or piece.patience < math.inf for piece in self.waiting()):
            assert all(loads[rank] >= self.saturation for rank in self.available)

    # Arithmetic

    def matched(self, request: RoutableRequest, rank: int) -> int:
        """Leading blocks that the rank holds or has been promised."""
        known_blocks = self.blocks[rank] | {block for piece in self._promising(rank) for block in piece.request.blocks}
        count = 0
        for block in request.blocks:
            if block not in known_blocks:
                break
            count += 1
        return count

    def questions(self, request: RoutableRequest) -> tuple[int, ...]:
        return tuple(range(len(request.questions)))

    def _question_cost(self, request: RoutableRequest, question: int) -> int:
        return sum(self.formula.flops(before, tokens) for before, tokens in request.questions[question].runs)

    def _cost(self, request: RoutableRequest, blocks: int, questions: tuple[int, ...]) -> int:
        there = blocks * BLOCK
        prompt = self.formula.flops(there, request.prompt_tokens - there)
        return prompt + sum(self._question_cost(request, question) for question in questions)

    def _place(self, piece: Piece, unsaturated: list[int]) -> tuple[float, int, tuple[int, ...]]:
        key = piece.request.arrived - piece.request.priority * PRIORITY_SECONDS
        if piece.waits_for not in (None, *unsaturated):
            key += piece.patience
        return key, piece.order, piece.questions

    def _unsaturated(self) -> list[int]:
        loads = self.loads()
        return [rank for rank in sorted(self.available) if loads[rank] < self.saturation or math.isinf(self.saturation)]

    def _on(self, rank: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.assignment and piece.assignment.rank == rank]

    def _promising(self, rank: int) -> list[Piece]:
        return [piece for piece in self._on(rank) if self.keeps_blocks or not piece.is_started]

    def _push(self, request: RoutableRequest, order: int, questions: tuple[int, ...], attempt: int = 1) -> None:
        self.pieces.append(Piece(request, order, questions, attempt))
