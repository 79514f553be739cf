"""Layers and loops in forms that no package writes are refused with a reason, and compute the same afterwards."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, undo_order
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.rewritten_loops import count_gemms_and_selections, rewrite_loop
from tests.helpers.project_styles.exact_style import ExactLayer, SlicesOfModules
from tests.helpers.project_styles.local_loops import AnyPlace, FlatPairs, MaskLoop, SelectedLoop
from tests.helpers.project_styles.slice_loops import SlicesByCounts
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import StyleSizes, random_weight, stacked_gated_experts

CAPACITY = 3


class _StackedExperts(ExactLayer):
    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.gate, self.up, self.down = stacked_gated_experts(sizes, self.owned)

    def exchange(self, values: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return exchange_rows(values, send, receive, self.group_name)

    def compute(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the outputs for rows in any order; `ids` are their experts, or the number of experts for none."""
        sorted_ids, order = torch.sort(ids, stable=True)
        ends = count_per_expert(sorted_ids, len(self.owned)).cumsum(0, dtype=torch.int32)
        gate, up = (grouped_gemm(rows[order], weights.transpose(1, 2), ends) for weights in (self.gate, self.up))
        outputs = grouped_gemm(F.silu(gate) * up, self.down.transpose(1, 2), ends)
        return undo_order(outputs.masked_fill((sorted_ids == len(self.owned)).unsqueeze(-1), 0.0), order)


class IdsTravel(_StackedExperts):
    """Ranks count rows only by rank, and send the expert of each row beside it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=-1)
        ids, order = torch.sort(chosen.view(-1), stable=True)
        counts, each = count_per_expert(ids // len(self.owned), self.ranks), [1] * self.ranks
        receive, send = self.exchange(counts, each, each).tolist(), counts.tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        rows = self.exchange(hidden[order // self.sizes.top_k], send, receive)
        local = self.exchange(ids, send, receive) - self.owned.start
        returned = self.exchange(self.compute(rows, local), receive, send)
        weighed = returned * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, weighed)


class CountedSlots(_StackedExperts):
    """Each expert has a fixed number of slots, and ranks tell how many of them are filled."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        owned, experts, top_k = len(self.owned), self.sizes.experts, self.sizes.top_k
        weights, chosen = torch.topk(self.router(hidden), top_k, dim=-1)
        ids, order = torch.sort(chosen.view(-1), stable=True)
        counts = count_per_expert(ids, experts)
        place = torch.arange(ids.shape[0]) - (counts.cumsum(0) - counts)[ids]
        slot = torch.where(place < CAPACITY, ids * CAPACITY + place, experts * CAPACITY)
        slots = hidden.new_zeros(experts * CAPACITY + 1, hidden.shape[1])
        slots[slot] = hidden[order // top_k]
        counted, equal = [owned] * self.ranks, [owned * CAPACITY] * self.ranks
        filled = self.exchange(counts.clamp(max=CAPACITY), counted, counted)
        arrived = self.exchange(slots[:-1], equal, equal)
        local = torch.arange(owned).repeat(self.ranks).unsqueeze(-1)
        local = torch.where(torch.arange(CAPACITY) < filled.unsqueeze(-1), local, owned)
        returned = self.exchange(self.compute(arrived, local.view(-1)), equal, equal)
        weighed = F.pad(returned, (0, 0, 0, 1))[slot] * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // top_k, weighed)


class LowRankLinear(nn.Module):
    """A linear layer x W + (x A) B · scale, as of LoRA."""

    def __init__(self, sizes: StyleSizes, seed: int, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = random_weight(sizes, seed, outer, inner)
        self.low, self.high = random_weight(sizes, seed + 1000, 4, inner), random_weight(sizes, seed + 2000, outer, 4)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight) + F.linear(F.linear(rows, self.low), self.high) * self.scale


class LowRankExpert(nn.Module):
    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__()
        self.gate = LowRankLinear(sizes, 10 * expert + 3, sizes.hidden, sizes.width)
        self.up = LowRankLinear(sizes, 10 * expert + 4, sizes.hidden, sizes.width)
        self.down = LowRankLinear(sizes, 10 * expert + 5, sizes.width, sizes.hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return result


class LowRankModules(SlicesOfModules):
    """DeepSeek's published code with LoRA."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = nn.ModuleList(LowRankExpert(sizes, number) for number in self.owned)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (IdsTravel, "such as the ids of their experts; expected rows that are sorted by expert"),
        (CountedSlots, "exchanges a constant number of slots"),
        (LowRankModules, "matrices of low rank"),
    ],
)
def test_a_layer_in_a_removed_form_is_refused(layer: type[nn.Module], reason: str) -> None:
    captured = [capture_layer(functools.partial(layer, SIZES), rank, 2) for rank in range(2)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    for captured_rank, result in zip(captured, results, strict=True):
        assert any(reason in refusal.reason for refusal in result.refusals), result.refusals
        assert not result.plan.banks
        assert collective_kinds(result) == collective_kinds(captured_rank)
    check_same_outputs(captured, results, [(9, 4), (30, 41)])


class ColumnByColumn(MaskLoop):
    """A loop over experts for the first choice of all tokens, then for the second."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for choice in range(self.top_k):
            for number in self.order:
                mask = chosen[:, choice] == number
                result[mask] += self.module_of(number)(hidden[mask]) * weights[mask, choice].unsqueeze(-1)
        return result


class SummedWeights(MaskLoop):
    """The weights of a token are summed, 0 for experts it has not chosen, and selected afterwards."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(hidden)
        result = self.start(hidden)
        for number in self.order:
            mask = (chosen == number).any(dim=-1)
            scales = (weights * (chosen == number)).sum(dim=-1, keepdim=True)
            result[mask] += self.module_of(number)(hidden[mask]) * scales[mask]
        return result


class LargestScore(MaskLoop):
    """Each token has the expert of its largest score, by `argmax`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.router(hidden).argmax(dim=-1)
        result = torch.empty_like(hidden)
        for number in self.order:
            result[chosen == number] = self.module_of(number)(hidden[chosen == number])
        return result


class SortedScores(AnyPlace):
    """The experts of each token are the first of all, sorted by score."""

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = self.router(hidden).softmax(dim=-1).sort(dim=-1, descending=True)
        return chosen[:, : self.top_k], weights[:, : self.top_k]


class ScatteredSums(SelectedLoop):
    def add(self, result: torch.Tensor, number: int, rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return result.scatter_add(0, token.unsqueeze(1).expand(-1, rows.shape[1]), rows)


class CopiedPairs(FlatPairs):
    def write(self, result: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        pair = mask.nonzero().squeeze(-1)
        return result.index_copy_(0, pair, self.module_of(number)(rows.index_select(0, pair)))


class SlicesByEnds(SlicesByCounts):
    """The host reads where the rows of each expert end."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs, start = [], 0
        for expert, end in zip(self.experts, counts.cumsum(0).tolist(), strict=True):
            torch._check(end >= start)
            torch._check(end <= rows.shape[0])
            outputs.append(expert(rows[start:end]))
            start = end
        return torch.cat(outputs)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ColumnByColumn, "is not computed from expert ids"),
        (SummedWeights, "compares ids of experts, but does not select rows or weights by them alone"),
        (LargestScore, "is not computed from expert ids"),
        (SortedScores, "is not computed from expert ids"),
        (ScatteredSums, "expected result.index_add_(0, tokens, rows)"),
        (CopiedPairs, "expected result.index_add_(0, tokens, rows)"),
        (SlicesByEnds, "with a count n that the host read"),
    ],
)
def test_a_loop_in_a_removed_form_is_refused(model: type[nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    module, refusals = rewrite_loop(model())
    assert count_gemms_and_selections(module)[0] == 0
    assert [reason in refusal.reason for refusal in refusals] == [True], refusals
