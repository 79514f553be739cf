"""Simple routing policies for comparison. They ignore prefixes and saturation, and assign all work at once.

Loads and tables are kept as in every router, so shared prefixes are counted when they happen to meet on a rank.
"""

from __future__ import annotations

from moepass.runtime.serving.router.assignments import Assignment
from moepass.runtime.serving.router.open_work import Work
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankChoice, RankRouter, set_bits


class RoundRobinRouter(RankRouter):
    """A policy that takes the available ranks in turn."""

    def __init__(
        self, ranks: int, formula: FlopsFormula, *, priority_seconds: float = 1.0, keeps_blocks: bool = True
    ) -> None:
        super().__init__(ranks, formula, priority_seconds=priority_seconds, keeps_blocks=keeps_blocks)
        self._last = ranks - 1

    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        available = self._available
        later = available >> (self._last + 1) << (self._last + 1)
        self._last = rank = _lowest_bit(later or available)
        return ((rank, self._tables.longest_match(work.request.blocks, 1 << rank)[1], work.questions),)


class LeastTokensRouter(RankRouter):
    """A policy that picks the rank with the fewest unfinished tokens, the first of several."""

    def __init__(
        self, ranks: int, formula: FlopsFormula, *, priority_seconds: float = 1.0, keeps_blocks: bool = True
    ) -> None:
        super().__init__(ranks, formula, priority_seconds=priority_seconds, keeps_blocks=keeps_blocks)
        self._tokens = [0] * ranks

    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        tokens = self._tokens
        rank = (
            tokens.index(min(tokens))
            if self._available == self._all
            else min(set_bits(self._available), key=tokens.__getitem__)
        )
        return ((rank, self._tables.longest_match(work.request.blocks, 1 << rank)[1], work.questions),)

    def _assign(self, work: Work, rank: int, blocks: int) -> Assignment:
        self._tokens[rank] += _tokens(work)
        return super()._assign(work, rank, blocks)

    def _release(self, work: Work) -> Assignment:
        assignment = super()._release(work)
        self._tokens[assignment.rank] -= _tokens(work)
        return assignment


def _tokens(work: Work) -> int:
    request = work.request
    parts = request.parts
    return request.prompt_tokens + sum(parts[index].tokens for question in work.questions for index in question.parts)


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
