"""The routing policy of the server: FLOPs without padding, saturation, and committed or pending prefixes."""

from __future__ import annotations

import itertools
import math

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.block_tables import set_bits
from moepass.runtime.serving.router.routable import FlopsFormula, Round
from moepass.runtime.serving.router.router import RankChoice, RankRouter
from moepass.runtime.serving.router.waiting_queue import RoutedQuestion, Work

# Limit of the work that one round parks for saturated ranks; it bounds the duration of a round.
MOST_PASSED_OVER = 1024


class PrefixRouter(RankRouter):
    """A policy that picks the unsaturated rank with the longest held prefix, and the least loaded one if several tie.

    It takes the arguments of `RankRouter`, the rate of a rank from the plan, and whether the questions of a request may
    go to several ranks (`splits`).
    """

    def __init__(
        self,
        ranks: int,
        formula: FlopsFormula,
        *,
        saturation_flops: int,
        flops_per_second: float,
        keeps_blocks: bool = True,
        splits: bool = True,
    ) -> None:
        super().__init__(ranks, formula, saturation_flops=saturation_flops, keeps_blocks=keeps_blocks)
        self._flops_per_second = flops_per_second
        self._splits = splits
        self._passed_over = 0  # pieces of work that this round has parked

    def route(self, now: float) -> Round:
        """Run one round, as `RankRouter.route`."""
        self._passed_over = 0
        return super().route(now)

    def _choose_ranks(self, work: Work, now: float) -> tuple[RankChoice, ...]:
        request = work.request
        open_ranks = self._open
        blocks = 0
        holders = self._available
        if request.blocks:
            holders, blocks = self.tables.longest_match(request.blocks, holders)
        if not holders & open_ranks:
            if work.may_wait and self._passed_over < MOST_PASSED_OVER and self._wait(work, holders, blocks, now):
                return ()
            holders, blocks = self.tables.longest_match(request.blocks, open_ranks)
        rank = self._least_loaded(holders & open_ranks)
        if self._splits and len(work.questions) > 1 and self._loads[rank] + work.flops > self.saturation_flops:
            return self._split(work, rank, blocks)
        return ((rank, blocks, work.questions),)

    def _wait(self, work: Work, holders: int, blocks: int, now: float) -> bool:
        """Park work for one of the saturated `holders` of its prefix, and return whether it was parked.

        The holders have `blocks` of the prompt, more than any open rank. README.md explains the rule.
        """
        request = work.request
        holder = self._least_loaded(holders)
        load = self._loads[holder]
        held_tokens = blocks * BLOCK_TOKENS
        remaining_flops = self._flops(held_tokens, request.prompt_tokens - held_tokens)
        seconds = load / self._flops_per_second
        if request.deadline != math.inf:
            remaining_flops += sum(question.flops for question in work.questions)
            if now + seconds + remaining_flops / self._flops_per_second > request.deadline:
                return False
        patience_seconds: float | None = seconds
        if work.prompt_flops > load:  # otherwise no prefix of it costs more than the load
            open_tokens = self.tables.longest_match(request.blocks, self._open)[1] * BLOCK_TOKENS
            if self._flops(open_tokens, held_tokens - open_tokens) > load:
                patience_seconds = None
        self.queue.park(work, holder, patience_seconds)
        self._passed_over += 1
        return True

    def _split(self, work: Work, first: int, blocks: int) -> tuple[RankChoice, ...]:
        """Distribute questions over more ranks while the request ends earlier by more than the prompt costs there."""
        unsplit = ((first, blocks, work.questions),)
        request = work.request
        total = sum(question.flops for question in work.questions)
        matched = {rank: self.tables.longest_match(request.blocks, 1 << rank)[1] for rank in set_bits(self._open)}
        prompts = {
            rank: self._flops(count * BLOCK_TOKENS, request.prompt_tokens - count * BLOCK_TOKENS)
            for rank, count in matched.items()
        }
        loads = {rank: self._loads[rank] + flops for rank, flops in prompts.items()}
        ranks = [first]
        end = before = self._end(loads[first] + total)
        for rank in sorted(loads.keys() - {first}, key=lambda rank: (loads[rank], rank)):
            earlier = self._end(_even_load([loads[candidate] for candidate in (*ranks, rank)], total))
            if prompts[rank] < end - earlier:
                ranks.append(rank)
                end = earlier
        shares = _shares(work.questions, [loads[rank] for rank in ranks], end)
        used = list(itertools.takewhile(lambda used_rank: used_rank[1], zip(ranks, shares, strict=True)))
        # Questions are indivisible, so the ranks may end later than the even load says.
        end = self._end(max(loads[rank] + sum(question.flops for question in share) for rank, share in used))
        if sum(prompts[rank] for rank, _ in used[1:]) >= before - end:
            return unsplit
        return tuple((rank, matched[rank], share) for rank, share in used)

    def _end(self, load: int) -> int:
        return max(load, int(self.saturation_flops))


def _even_load(loads: list[int], total: int) -> int:
    """Return the load of the fullest rank if `total` were divided to make the loads as even as possible, rounded up."""
    below = 0
    for count, load in enumerate(ordered := sorted(loads), start=1):
        below += load
        level = -(-(below + total) // count)
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("there is at least one rank")


def _shares(questions: tuple[RoutedQuestion, ...], loads: list[int], level: int) -> list[tuple[RoutedQuestion, ...]]:
    """Return consecutive shares of `questions`, one for each rank.

    Each rank is filled up to `level` with at least one question, and the last rank gets the remaining ones. A question
    goes to the rank on which at least half of it fits, and the difference is carried over to the next rank.
    """
    shares: list[tuple[RoutedQuestion, ...]] = []
    index = surplus = 0
    for load in loads[:-1]:
        start = index
        surplus += level - load
        while index < len(questions) and (index == start or 2 * surplus > questions[index].flops):
            surplus -= questions[index].flops
            index += 1
        shares.append(questions[start:index])
    return [*shares, questions[index:]]
