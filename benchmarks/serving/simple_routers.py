"""Simple routing policies for comparison. They ignore prefixes and saturation, and assign all work at once.

Loads and tables are kept as in every router, so shared prefixes are counted when they happen to meet on a rank.
"""

from __future__ import annotations

from moepass.runtime.serving.router.block_tables import set_bits
from moepass.runtime.serving.router.routable import Assignment, FlopsFormula
from moepass.runtime.serving.router.router import RankChoice, RankRouter
from moepass.runtime.serving.router.waiting_queue import Work


class RoundRobinRouter(RankRouter):
    """A policy that takes the available ranks in turn."""

    def __init__(self, ranks: int, formula: FlopsFormula, *, keeps_blocks: bool = True) -> None:
        super().__init__(ranks, formula, keeps_blocks=keeps_blocks)
        self._last = ranks - 1

    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        available = self._available
        later = available >> (self._last + 1) << (self._last + 1)
        self._last = rank = _lowest_bit(later or available)
        return ((rank, self.tables.longest_match(work.request.blocks, 1 << rank)[1], work.questions),)


class LeastTokensRouter(RankRouter):
    """A policy that picks the rank with the fewest unfinished tokens, the first of several."""

    def __init__(self, ranks: int, formula: FlopsFormula, *, keeps_blocks: bool = True) -> None:
        super().__init__(ranks, formula, keeps_blocks=keeps_blocks)
        self._tokens = [0] * ranks

    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        tokens = self._tokens
        rank = (
            tokens.index(min(tokens))
            if self._available == self._all
            else min(set_bits(self._available), key=tokens.__getitem__)
        )
        return ((rank, self.tables.longest_match(work.request.blocks, 1 << rank)[1], work.questions),)

    def _assign(self, work: Work, rank: int, blocks: int) -> Assignment:
        self._tokens[rank] += _tokens(work)
        return super()._assign(work, rank, blocks)

    def _release(self, work: Work) -> Assignment:
        assignment = super()._release(work)
        self._tokens[assignment.rank] -= _tokens(work)
        return assignment


def _tokens(work: Work) -> int:
    request = work.request
    shares = {question.parts for question in work.questions}
    questions = (question for question in request.questions if question.parts in shares)
    return request.prompt_tokens + sum(tokens for question in questions for _, tokens in question.runs)


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1
