"""Run an AllToAll block whose rows take two hops with mock peers.

Contract, for the rank with the places (a, b) on the two axes
    it sends over the first axis, place by place, the rows for all experts of the ranks with that place, sorted by
    their place on the second axis and by expert, and how many there are for each expert
    what comes to it like that, from ranks (x, b), it passes on over the second axis, place by place: to rank (a, y) the
    rows for its experts, those of one x after those of another, each sorted by expert; or sorted by expert, and for
    each expert by x. Which of the two, all ranks say the same (`Hops.by_expert`). With them goes how many there are,
    for each expert and x in that order, or for each expert
    it sends back each row's output in the same place, and passes on what comes back for the rows that it passed on

Experts are counted here in the order in which rows are sorted, by place on the first axis, then on the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moepass.passes.graph.collectives import Collective
from moepass.passes.parallel.mock.mock_run import ContractBroken, MockRun
from moepass.passes.parallel.proof.demands import IN_ANOTHER_ORDER, demand, equal
from moepass.passes.parallel.proof.sent_rows import SentRows, by_expert, expert_outputs


def check_two_hops(run: MockRun) -> None:
    """Raises ContractBroken where the block, or its local form, does not follow the contract in this run."""
    block = run.block
    rows_node, counts_node = block.sources["rows"], block.sources.get("counts")
    exchange = _HopExchange(run)
    own = exchange.own
    values = {rows_node: own.rows}
    if counts_node is not None:
        values[counts_node] = own.counts.view(run.mock.shape(counts_node))
    run.run_block(values, exchange.answer)
    outputs = run.run_local_form(values)
    demand(equal(outputs, exchange.outputs([own])), "its local form gives something else")


class _HopExchange:
    """Plays the other ranks: those with this rank's place on one of the axes."""

    def __init__(self, run: MockRun) -> None:
        block, hops = run.block, run.block.hops
        assert hops is not None
        self._run, self._hops, self._grid = run, hops, hops.grid
        own_pairs = run.mock.shape(block.sources["rows"])[0]
        self._capacity = None if block.form == "all_to_all" else own_pairs // block.experts
        self._each = len(block.own_experts)
        self.own = SentRows.draw(run, run.scenario.own, own_pairs, range(block.experts), self._capacity)
        first, second = self._grid.first, self._grid.second
        passed, arriving = self._experts_at(first.rank), self._experts_at(first.rank, second.rank)
        # What comes over the first axis, from each place on it.
        self._passed = [self._draw(place, own_pairs, passed) for place in range(first.ranks)]
        # What comes over the second axis, from each place on it, and for each the places that it was passed on from.
        self._arriving = [
            [self._draw(place * first.ranks + origin, own_pairs, arriving) for origin in range(first.ranks)]
            for place in range(second.ranks)
        ]

    def _draw(self, peer: int, own_pairs: int, experts: range) -> SentRows:
        pairs = self._run.peer_pairs(peer, own_pairs, len(experts))
        return SentRows.draw(self._run, self._run.scenario.peers, pairs, experts, self._capacity)

    def _experts_at(self, first: int, second: int | None = None) -> range:
        """Those of the ranks with a place on the first axis, or of the one with a place on the second too."""
        ranks = self._grid.second.ranks
        if second is None:
            return range(first * ranks * self._each, (first + 1) * ranks * self._each)
        rank = first * ranks + second
        return range(rank * self._each, (rank + 1) * self._each)

    def outputs(self, parts: Sequence[SentRows]) -> torch.Tensor:
        """What the experts give for `parts`, one after the other."""
        first, second = self._grid.first.ranks, self._grid.second.ranks
        places = itertools.product(range(first), range(second), range(self._each))
        numbers = [self._grid.rank_at(x, y) * self._each + expert for x, y, expert in places]
        return expert_outputs(self._run, parts, torch.tensor(numbers))

    # ---------------------------------------------------------------------------------------------------- passing on

    def _onward(self) -> list[list[SentRows]]:
        """What this rank passes on: for each place on the second axis, what came from each place on the first."""
        places = [self._experts_at(self._grid.first.rank, place) for place in range(self._grid.second.ranks)]
        return [[part.among(experts) for part in self._passed] for experts in places]

    def _in_order(self, parts: Sequence[SentRows], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """`values` of the rows of `parts`, which go to one rank, as they are passed on."""
        return by_expert(parts, values) if self._hops.by_expert else torch.cat(list(values))

    def _rows(self, parts: Sequence[SentRows]) -> torch.Tensor:
        return self._in_order(parts, [part.rows for part in parts])

    def _outputs(self, parts: Sequence[SentRows]) -> torch.Tensor:
        return self._in_order(parts, [self.outputs([part]) for part in parts])

    def _counts(self, parts: Sequence[SentRows], *, summed: bool) -> torch.Tensor:
        """How many rows there are in `parts`, which go to one rank."""
        counts = torch.stack([part.counts[part.experts.start : part.experts.stop] for part in parts])
        if summed:
            return counts.sum(0)
        return (counts.t() if self._hops.by_expert else counts).reshape(-1)

    # -------------------------------------------------------------------------------------------------------- answers

    def answer(self, collective: Collective, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        node, hops = collective.node, self._hops
        counts = [one.node for one in hops.counts]
        (first, second), (onwards, last) = (tuple(one.node for one in rows) for rows in (hops.there, hops.back))
        passed, arriving = self._passed, self._arriving
        if node in counts:
            answer = self._first_counts if node is counts[0] else self._second_counts
            return answer(sent, send, receive).to(sent.dtype)
        if node is first:
            self._check_sizes(send, self._own_sizes(), receive, [len(part.rows) for part in passed])
            demand(equal(sent, self.own.rows), "it sends other rows than it counted")
            return torch.cat([part.rows for part in passed])
        if node is last:
            self._check_sizes(receive, self._own_sizes(), send, [len(part.rows) for part in passed])
            demand(equal(sent, self.outputs(passed)), "it does not pass on the outputs for the rows that it passed on")
            return self.outputs([self.own])
        onward = self._onward()
        there, here = ([sum(len(part.rows) for part in parts) for parts in of] for of in (onward, arriving))
        if node is second:
            self._check_sizes(send, there, receive, here)
            wanted = torch.cat([self._rows(parts) for parts in onward])
            demand(equal(sent, wanted), f"it passes on other rows, {IN_ANOTHER_ORDER}")
            return torch.cat([self._rows(parts) for parts in arriving])
        if node is onwards:
            self._check_sizes(receive, there, send, here)
            wanted = torch.cat([self._outputs(parts) for parts in arriving])
            demand(equal(sent, wanted), "it sends back other outputs than its experts' for the rows")
            return torch.cat([self._outputs(parts) for parts in onward])
        raise ContractBroken(f"it needs an answer to {collective.kind}")

    def _own_sizes(self) -> list[int]:
        bounds = [self._experts_at(place).start for place in range(self._grid.first.ranks)]
        return self.own.sizes_by_rank([*bounds, self._run.block.experts])

    def _check_sizes(self, send: list[int], sent: list[int], receive: list[int], received: list[int]) -> None:
        demand(send == sent, f"it exchanges rows in parts of {send}, and counted {sent}")
        demand(receive == received, f"it exchanges rows in parts of {receive}, where ranks counted {received}")

    def _first_counts(self, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        demand(equal(sent.reshape(-1), self.own.counts), "it sends counts that are not those of its rows")
        experts = self._experts_at(self._grid.first.rank)
        self._check_counts(sent, send, receive, len(experts), self._grid.first.ranks)
        arriving = torch.stack([part.counts[experts.start : experts.stop] for part in self._passed])
        return arriving.reshape(sent.shape)

    def _second_counts(self, sent: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ranks = self._grid.second.ranks
        summed = sent.numel() == ranks * self._each and self._hops.by_expert
        onward = torch.cat([self._counts(parts, summed=summed) for parts in self._onward()])
        demand(equal(sent.reshape(-1), onward), f"it passes on other counts, {IN_ANOTHER_ORDER}")
        self._check_counts(sent, send, receive, len(onward) // ranks, ranks)
        return torch.cat([self._counts(parts, summed=summed) for parts in self._arriving]).reshape(sent.shape)

    def _check_counts(self, sent: torch.Tensor, send: list[int], receive: list[int], each: int, ranks: int) -> None:
        """There are `each` for every one of `ranks`."""
        unit = sent.numel() // max(1, sent.shape[0])
        demand(send == receive == [each // max(1, unit)] * ranks, "it exchanges other counts")
