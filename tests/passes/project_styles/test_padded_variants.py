"""Padded rows in other exchanges, and together with other values that are exchanged with rows."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.gathered_style import GatheredMasks, GatheredOrder
from tests.helpers.project_styles.padded_style import PaddedLayer, Padding, ScatteredRows, SearchedTable
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import BiasedExpert, StyleSizes, stacked


class WeightsInside(PaddedLayer):
    """Weights are exchanged, padded like the rows, and applied by the experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        counts = count_per_expert(chosen.view(-1), self.sizes.experts)
        order = torch.argsort(chosen.view(-1), stable=True)
        arriving, send, receive = self.exchange_counts(counts)
        arrived = exchange_rows(hidden[order // self.sizes.top_k], send, receive, self.group_name)
        weights = exchange_rows(scores.view(-1)[order].to(hidden.dtype), send, receive, self.group_name)
        number, owned = arrived.shape[0], len(self.owned)
        # Rows of each rank are padded separately.
        groups = arriving.view(self.ranks, owned).t().reshape(-1)
        padded = (groups + 7) // 8 * 8
        start = (padded.cumsum(0) - padded).view(owned, self.ranks).t().reshape(-1)
        first = arriving.cumsum(0) - arriving
        position = torch.arange(number) + (start - first).repeat_interleave(arriving, output_size=number)
        laid = arrived.new_zeros((number + owned * self.ranks * 8, arrived.shape[1]))
        laid_weights = arrived.new_zeros((number + owned * self.ranks * 8,))
        laid[position], laid_weights[position] = arrived, weights
        ends = padded.view(owned, self.ranks).sum(1).cumsum(0).to(torch.int32)
        experts, gemm = self.experts, self.experts._gemm
        inner = F.silu(gemm(laid, experts.gate, ends)) * gemm(laid, experts.up, ends) * laid_weights.unsqueeze(-1)
        outputs = gemm(inner, experts.down, ends)[position]
        returned = exchange_rows(outputs, receive, send, self.group_name)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, returned)


class BiasedAndPadded(PaddedLayer):
    """Biases are looked up for padding and for the positions after it as well."""

    padding = ScatteredRows()

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        ExactLayer.__init__(self, sizes, group)
        experts = [BiasedExpert(sizes, number) for number in self.owned]
        self.up, self.down = stacked([expert.up for expert in experts]), stacked([expert.down for expert in experts])
        self.up_bias = stacked([expert.up_bias for expert in experts])
        self.down_bias = stacked([expert.down_bias for expert in experts])

    def experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ends = counts.cumsum(0)
        ids = torch.searchsorted(ends, torch.arange(rows.shape[0]), right=True).clamp(max=len(self.owned) - 1)
        ends = ends.to(torch.int32)
        inner = F.gelu(grouped_gemm(rows, self.up.transpose(1, 2), ends) + self.up_bias[ids])
        return grouped_gemm(inner, self.down.transpose(1, 2), ends) + self.down_bias[ids]


class GatheredThatPads(GatheredMasks):
    """All ranks have all tokens; each expert pads its rows and probabilities."""

    def _run(self, rows: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        torch._check(sum(sizes) == weights.shape[0])
        outputs = []
        for expert, rows_of_expert, weight in zip(self.experts, rows.split(sizes), weights.split(sizes), strict=True):
            size = rows_of_expert.shape[0]
            more = (size + 15) // 16 * 16 - size
            padded = torch.cat([rows_of_expert, rows_of_expert.new_zeros(more, rows_of_expert.shape[1])])
            outputs.append(expert(padded, torch.cat([weight, weight.new_zeros(more)]))[:size])
        return torch.cat(outputs)


class OrderThatPads(GatheredOrder):
    """All ranks have all tokens; the rows of this rank's experts are padded."""

    padding: Padding = SearchedTable()

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.padding.run(rows, counts, super().compute)


class OrderAndScatter(OrderThatPads):
    padding = ScatteredRows()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "form"),
    [
        (OrderThatPads, "all_gather"),
        (OrderAndScatter, "all_gather"),
        (GatheredThatPads, "all_gather"),
        (WeightsInside, "all_to_all"),
        (BiasedAndPadded, "all_to_all"),
    ],
)
def test_padded_rows_are_taken_in_other_layers(layer: type[nn.Module], form: str) -> None:
    captured = [capture_layer(functools.partial(layer, SIZES), rank, 2) for rank in range(2)]
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == [form], result.plan.refusals
        assert collective_kinds(result) == []
    is_even = form == "all_gather"
    check_same_outputs(captured, results, [(9, 9), (40, 40)] if is_even else [(9, 4), (1, 3), (40, 61)])
