"""Policies to compare with. They see no prefixes and no saturation: ranks get everything at once.

Loads and tables are kept as everywhere, so what they save is what happens to meet on a rank.
"""

from __future__ import annotations

from moepass.runtime.serving.router.decisions import Assignment
from moepass.runtime.serving.router.open_work import Work
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import Placement, RankRouter, bits


class RoundRobinRouter(RankRouter):
    """The ranks in turns."""

    def __init__(
        self, ranks: int, formula: FlopsFormula, *, priority_seconds: float = 1.0, keeps_blocks: bool = True
    ) -> None:
        super().__init__(ranks, formula, priority_seconds=priority_seconds, keeps_blocks=keeps_blocks)
        self._last = ranks - 1

    def _place(self, work: Work, now: float) -> tuple[Placement, ...]:
        available = self._available
        later = available >> (self._last + 1) << (self._last + 1)
        self._last = rank = _lowest_bit(later or available)
        return ((rank, self._tables.deepest(work.request.blocks, 1 << rank)[1], work.questions),)


class LeastTokensRouter(RankRouter):
    """The rank with the fewest tokens to do; the first of equals."""

    def __init__(
        self, ranks: int, formula: FlopsFormula, *, priority_seconds: float = 1.0, keeps_blocks: bool = True
    ) -> None:
        super().__init__(ranks, formula, priority_seconds=priority_seconds, keeps_blocks=keeps_blocks)
        self._tokens = [0] * ranks

    def _place(self, work: Work, now: float) -> tuple[Placement, ...]:
        tokens = self._tokens
        rank = (
            tokens.index(min(tokens))
            if self._available == self._all
            else min(bits(self._available), key=tokens.__getitem__)
        )
        return ((rank, self._tables.deepest(work.request.blocks, 1 << rank)[1], work.questions),)

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
    return request.prompt_tokens + sum(parts[part].tokens for question in work.questions for part in question.parts)


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
