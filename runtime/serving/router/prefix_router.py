"""The policy of this server: true FLOPs, saturation, and prefixes that are there or on their way."""

from __future__ import annotations

import itertools
import math

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.decisions import Round
from moepass.runtime.serving.router.open_work import Work
from moepass.runtime.serving.router.routable import FlopsFormula, RoutedQuestion
from moepass.runtime.serving.router.router import Placement, RankRouter, bits

# Work that one round passes over because it waits for a saturated rank; bounds the time of a round.
MOST_PASSED_OVER = 1024


class PrefixRouter(RankRouter):
    """Of the ranks that are not saturated, the one that saves most; ties, and no match, to the least loaded.

    A longer match always saves more FLOPs, so the most blocks decide. Two rules see beyond the one request and the one
    rank: `_wait` (wait for a saturated rank, or spill) and `_split` (questions of one request on several ranks).

    Args:
        saturation_flops: from the plan; a rank with this load or more takes no more.
        flops_per_second: that a rank reaches, from the plan.
        splits: questions of one request may go to several ranks.
    """

    def __init__(
        self,
        ranks: int,
        formula: FlopsFormula,
        *,
        saturation_flops: int,
        flops_per_second: float,
        priority_seconds: float = 1.0,
        keeps_blocks: bool = True,
        splits: bool = True,
    ) -> None:
        if not (flops_per_second > 0 and math.isfinite(flops_per_second)):
            raise InputError.wrong("flops_per_second", flops_per_second, "a number above 0")
        super().__init__(
            ranks,
            formula,
            saturation_flops=saturation_flops,
            priority_seconds=priority_seconds,
            keeps_blocks=keeps_blocks,
        )
        self._flops_per_second = flops_per_second
        self._splits = splits
        self._passed_over = 0

    def route(self, now: float) -> Round:
        self._passed_over = 0
        return super().route(now)

    def _place(self, work: Work, now: float) -> tuple[Placement, ...]:
        request = work.request
        open_ranks = self._open
        blocks = 0
        holders = self._available
        if request.blocks:
            holders, blocks = self._tables.deepest(request.blocks, holders)
        if not holders & open_ranks:
            if work.may_wait and self._passed_over < MOST_PASSED_OVER and self._wait(work, holders, blocks, now):
                return ()
            holders, blocks = self._tables.deepest(request.blocks, open_ranks)
        rank = self._least_loaded(holders & open_ranks)
        if self._splits and len(work.questions) > 1 and self._loads[rank] + work.flops > self._saturation_flops:
            return self._split(work, rank, blocks)
        return ((rank, blocks, work.questions),)

    def _wait(self, work: Work, holders: int, blocks: int, now: float) -> bool:
        """Lets work wait for one of `holders`, which are saturated and have `blocks` of it, more than any open rank.

        For as long as that one needs for what it has, by the plan, other work goes first. Then, or where there is no
        other work, the prefix spills: an open rank computes it again, and has it from then on. But never where
        that takes longer than the wait. A request that would be late does not wait.
        """
        request = work.request
        holder = self._least_loaded(holders)
        load = self._loads[holder]
        there = blocks * BLOCK_TOKENS
        left = self._flops(there, request.prompt_tokens - there)
        seconds = load / self._flops_per_second
        if request.deadline != math.inf:
            left += sum(question.flops for question in work.questions)
            if now + seconds + left / self._flops_per_second > request.deadline:
                return False
        patience: float | None = seconds
        if work.prompt_flops > load:  # else no prefix of it can
            here = self._tables.deepest(request.blocks, self._open)[1] * BLOCK_TOKENS
            if self._flops(here, there - here) > load:
                patience = None
        self._queue.park(work, holder, patience)
        self._passed_over += 1
        return True

    def _split(self, work: Work, first: int, blocks: int) -> tuple[Placement, ...]:
        """Questions go to more ranks while that ends earlier by more than computing the prompt there costs.

        Nothing ends earlier than a saturated step: what a load has below the threshold does not count.
        """
        whole = ((first, blocks, work.questions),)
        request = work.request
        total = sum(question.flops for question in work.questions)
        matched = {rank: self._tables.deepest(request.blocks, 1 << rank)[1] for rank in bits(self._open)}
        prompts = {
            rank: self._flops(count * BLOCK_TOKENS, request.prompt_tokens - count * BLOCK_TOKENS)
            for rank, count in matched.items()
        }
        loads = {rank: self._loads[rank] + flops for rank, flops in prompts.items()}
        ranks = [first]
        end = before = self._end(loads[first] + total)
        for rank in sorted(loads.keys() - {first}, key=lambda rank: (loads[rank], rank)):
            earlier = self._end(_level([loads[one] for one in (*ranks, rank)], total))
            if prompts[rank] < end - earlier:
                ranks.append(rank)
                end = earlier
        shares = _shares(work.questions, [loads[rank] for rank in ranks], end)
        used = list(itertools.takewhile(lambda placed: placed[1], zip(ranks, shares, strict=True)))
        # Questions are not cut, so the ranks may end later than they would if they were.
        end = self._end(max(loads[rank] + sum(one.flops for one in share) for rank, share in used))
        if sum(prompts[rank] for rank, _ in used[1:]) >= before - end:
            return whole
        return tuple((rank, matched[rank], share) for rank, share in used)

    def _end(self, load: int) -> int:
        return max(load, int(self._saturation_flops))


def _level(loads: list[int], total: int) -> int:
    """The load of the fullest rank if `total` could be cut freely to make the loads as even as can be, rounded up."""
    below = 0
    for count, load in enumerate(ordered := sorted(loads), start=1):
        below += load
        level = -(-(below + total) // count)
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("there is at least one rank")


def _shares(questions: tuple[RoutedQuestion, ...], loads: list[int], level: int) -> list[tuple[RoutedQuestion, ...]]:
    """Questions in order, to each rank up to `level`, at least one; the last rank gets the others.

    A question goes where at least half of it has room, and the next rank gets what was too much or too little.
    """
    shares: list[tuple[RoutedQuestion, ...]] = []
    place = surplus = 0
    for load in loads[:-1]:
        start = place
        surplus += level - load
        while place < len(questions) and (place == start or 2 * surplus > questions[place].flops):
            surplus -= questions[place].flops
            place += 1
        shares.append(questions[start:place])
    return [*shares, questions[place:]]
