"""Counts of rows by expert before and after the exchange are supported for many ways to compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows, gather_rows
from moepass.models.reference.grouped_experts import grouped_gemm
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import (
    Captured,
)
from tests.helpers.project_styles.exact_style import ExactLayer, SlicesOfModules
from tests.helpers.project_styles.style_layers import capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import BiasedExpert, StyleSizes, stacked

SIZES = StyleSizes()
Count = Callable[[torch.Tensor, int], torch.Tensor]


def _every(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.arange(experts, device=ids.device)


def _ends(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.searchsorted(ids.sort()[0], _every(ids, experts), right=True)


# Functions that count expert ids [rows].
COUNTS: dict[str, Count] = {
    "bincount": lambda ids, experts: torch.bincount(ids, minlength=experts),
    "histc": lambda ids, experts: torch.histc(ids.float(), experts, 0, experts - 1).long(),
    "one_hot": lambda ids, experts: F.one_hot(ids, experts).sum(dim=0),
    "one_hot, last of cumsum": lambda ids, experts: F.one_hot(ids, experts).cumsum(dim=0)[-1],
    "scatter_add": lambda ids, experts: ids.new_zeros(experts).scatter_add(0, ids, torch.ones_like(ids)),
    "index_add": lambda ids, experts: ids.new_zeros(experts).index_add(0, ids, torch.ones_like(ids)),
    "index_put": lambda ids, experts: ids.new_zeros(experts).index_put((ids,), torch.ones_like(ids), accumulate=True),
    "equal": lambda ids, experts: (ids.unsqueeze(1) == _every(ids, experts)).sum(dim=0),
    "searchsorted": lambda ids, experts: torch.diff(_ends(ids, experts), prepend=ids.new_zeros(1)),
    "difference of cumsum": lambda ids, experts: (
        (ids.unsqueeze(1) <= _every(ids, experts)).sum(dim=0) - (ids.unsqueeze(1) < _every(ids, experts)).sum(dim=0)
    ),
}


class CountedLayer(ExactLayer):
    """Grouped GEMMs with biases; rows are counted by `before` ahead of the exchange and by `behind` after it."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup, before: Count, behind: Count) -> None:
        super().__init__(sizes, group)
        self.before, self.behind = before, behind
        experts = [BiasedExpert(sizes, number) for number in self.owned]
        self.up, self.down = stacked([expert.up for expert in experts]), stacked([expert.down for expert in experts])
        self.bias = stacked([expert.up_bias for expert in experts])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        ids, order = chosen.view(-1).sort(stable=True)
        counts = self.before(ids, self.sizes.experts)
        arriving, send, receive = self.exchange_counts(counts)
        arrived = exchange_rows(hidden[order // self.sizes.top_k], send, receive, self.group_name)
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        expert_of = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0])
        sorted_ids, by_expert = expert_of.sort(stable=True)
        ends = self.ends(expert_of, arriving)
        inner = F.gelu(grouped_gemm(arrived[by_expert], self.up.transpose(1, 2), ends) + self.bias[sorted_ids])
        outputs = torch.empty_like(arrived)
        outputs[by_expert] = grouped_gemm(inner, self.down.transpose(1, 2), ends)
        returned = exchange_rows(outputs, receive, send, self.group_name)
        weighed = returned * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, weighed)

    def ends(self, expert_of: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return self.behind(expert_of, len(self.owned)).cumsum(0, dtype=torch.int32)


def _gathered_counts(layer: ExactLayer, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    every = gather_rows(counts, layer.ranks, layer.group_name).view(layer.ranks, -1)
    arriving = every[:, layer.owned.start : layer.owned.stop]
    send = counts.view(layer.ranks, len(layer.owned)).sum(dim=1).tolist()
    receive = arriving.sum(dim=1).tolist()
    for size in (*send, *receive):
        torch._check(size >= 0)
    return arriving.reshape(-1), send, receive


class CountsOfAllRanks(CountedLayer):
    """Every rank gathers the counts of all ranks, and adds up those of its experts."""

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        return _gathered_counts(self, counts)

    def ends(self, expert_of: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        return arriving.view(self.ranks, -1).sum(dim=0).cumsum(0, dtype=torch.int32)


class SlicesByCountsOfAllRanks(SlicesOfModules):
    """A loop over slices by gathered counts."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup, before: Count, behind: Count) -> None:
        super().__init__(sizes, group)

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        return _gathered_counts(self, counts)


class SlicesByCountsInGivenMemory(SlicesByCountsOfAllRanks):
    """The ranks exchange counts by torch.distributed's own function."""

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        send, receive = (
            expert_counts.view(self.ranks, len(self.owned)).sum(dim=1).tolist() for expert_counts in (counts, arriving)
        )
        for size in (*send, *receive):
            torch._check(size >= 0)
        return arriving, send, receive


class CountsOnTheWire(CountedLayer):
    """Counts are exchanged in another type. This rank reads its own sizes before that."""

    wire = torch.int32

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        owned = len(self.owned)
        arriving = exchange_rows(
            counts.to(self.wire), [owned] * self.ranks, [owned] * self.ranks, self.group_name
        ).long()
        send = counts.view(self.ranks, owned).sum(dim=1).tolist()
        receive = arriving.view(self.ranks, owned).sum(dim=1).tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        return arriving, send, receive


class NarrowCountsOnTheWire(CountsOnTheWire):
    wire = torch.int16


def _captured(
    before: Count,
    behind: Count,
    rank: int,
    ranks: int,
    layer_type: type[ExactLayer] = CountedLayer,
    sizes: StyleSizes = SIZES,
) -> Captured:
    return capture_layer(lambda group: layer_type(sizes, group, before, behind), rank, ranks)  # type: ignore[call-arg]


def check_counts(
    before: Count,
    behind: Count,
    ranks: int,
    layer_type: type[ExactLayer] = CountedLayer,
    sizes: StyleSizes = SIZES,
) -> None:
    captured = [_captured(before, behind, rank, ranks, layer_type, sizes) for rank in range(ranks)]
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"], result.plan.refusals
        assert collective_kinds(result) == []
    check_same_outputs(captured, results, [(9, 4, 12, 7), (40, 1, 3, 2)])


def test_counts_may_have_a_data_dependent_length() -> None:
    check_counts(COUNTS["bincount"], COUNTS["histc"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("layer_type", [CountsOfAllRanks, SlicesByCountsOfAllRanks], ids=lambda kind: kind.__name__)
def test_counts_that_all_ranks_gather_and_add_up(layer_type: type[ExactLayer]) -> None:
    check_counts(COUNTS["histc"], COUNTS["histc"], 3, layer_type, dataclasses.replace(SIZES, experts=9))


@pytest.mark.slow
def test_counts_that_are_exchanged_into_given_memory() -> None:
    check_counts(COUNTS["histc"], COUNTS["histc"], 2, SlicesByCountsInGivenMemory)


@pytest.mark.slow
def test_counts_that_travel_in_another_type() -> None:
    check_counts(COUNTS["one_hot"], COUNTS["histc"], 2, CountsOnTheWire)


def test_counts_that_travel_in_a_type_that_does_not_hold_them() -> None:
    result = eliminate_readably(_captured(COUNTS["one_hot"], COUNTS["histc"], 0, 2, NarrowCountsOnTheWire))
    assert not result.plan.local_blocks
    assert "turns counts from torch.int64 into torch.int16 for their exchange" in result.refusals[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_counts_before_an_exchange_may_use_any_supported_operator(name: str) -> None:
    check_counts(COUNTS[name], COUNTS["histc"], 4)


# The fake kernel of a grouped GEMM needs the number of offsets, which depends on data after bincount. The last row of
# none is an error in the model itself.
_BEHIND = [name for name in COUNTS if name not in ("bincount", "one_hot, last of cumsum")]


@pytest.mark.slow
@pytest.mark.parametrize("name", _BEHIND)
def test_counts_after_an_exchange_may_use_most_supported_operators(name: str) -> None:
    check_counts(COUNTS["histc"], COUNTS[name], 2)


@pytest.mark.slow
def test_counts_that_need_a_row_are_refused() -> None:
    """A rank may receive no rows, for which the model itself fails."""
    result = eliminate_readably(_captured(COUNTS["histc"], COUNTS["one_hot, last of cumsum"], 0, 2))
    assert not result.plan.local_blocks
    assert "with peers without tokens" in result.refusals[0].reason
