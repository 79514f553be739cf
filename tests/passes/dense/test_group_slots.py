"""Slots of local experts, indexed by numbers and multiplied in a batch: only slots that are read are computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.slots.compute_read_slots import compute_read_slots
from tests.helpers.graphs.captured_layers import compare_layer, expert_forms
from tests.helpers.project_styles.dense_experts import EXPERTS, TOP_K, DenseExperts

CAPACITY = 16
Tensor = torch.Tensor


class Slots(DenseExperts):
    """Rows are written to slots [experts, capacity] and read there again; those without a slot are dropped."""

    has_bias = True

    def multiply(self, slots: Tensor) -> Tensor:
        up = torch.bmm(slots, self.up) + self.up_bias[:, None]
        return torch.bmm(self.activate(up), self.down) + self.down_bias[:, None]

    def move(self, rows: Tensor, expert: Tensor, position: Tensor, is_kept: Tensor) -> Tensor:
        """Return the results of rows that are written to slots and read again."""
        slot = torch.where(is_kept, expert * CAPACITY + position, EXPERTS * CAPACITY)
        slots = rows.new_zeros(EXPERTS * CAPACITY + 1, self.hidden).index_copy(0, slot, rows)[:-1]
        results = self.multiply(slots.view(EXPERTS, CAPACITY, -1)).view(EXPERTS * CAPACITY, -1)
        return torch.cat([results, results.new_zeros(1, self.hidden)])[slot]

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.choose(hidden)
        expert = ids.reshape(-1)
        mask = F.one_hot(expert, EXPERTS)
        position = ((mask.cumsum(0) - 1) * mask).sum(-1)
        rows = self.move(hidden.repeat_interleave(self.top_k, 0), expert, position, position < CAPACITY)
        return (rows.view(-1, self.top_k, self.hidden) * weights.unsqueeze(-1)).sum(1)


class TwoNumbers(Slots):
    """A variant that indexes slots by two numbers, with one more slot for dropped rows."""

    def move(self, rows: Tensor, expert: Tensor, position: Tensor, is_kept: Tensor) -> Tensor:
        position = torch.where(is_kept, position, CAPACITY)
        slots = rows.new_zeros(EXPERTS, CAPACITY + 1, self.hidden)
        slots[expert, position] = rows
        return self.multiply(slots)[expert, position] * is_kept.unsqueeze(-1)


class FromBehind(TwoNumbers):
    """Slots are indexed by negative numbers."""

    def move(self, rows: Tensor, expert: Tensor, position: Tensor, is_kept: Tensor) -> Tensor:
        return super().move(rows, expert - EXPERTS, position, is_kept)


class Gathered(Slots):
    """Slots are written by `scatter_add`, read by `gather` with an index per feature, and multiplied by einsum."""

    def multiply(self, slots: Tensor) -> Tensor:
        up = torch.einsum("ech,ehf->ecf", slots, self.up) + self.up_bias.unsqueeze(1)
        return torch.einsum("ecf,efh->ech", self.activate(up), self.down) + self.down_bias.unsqueeze(1)

    def move(self, rows: Tensor, expert: Tensor, position: Tensor, is_kept: Tensor) -> Tensor:
        slot = (
            torch.where(is_kept, expert * CAPACITY + position, EXPERTS * CAPACITY).unsqueeze(-1).expand(-1, self.hidden)
        )
        slots = rows.new_zeros(EXPERTS * CAPACITY + 1, self.hidden).scatter_add(0, slot, rows)[:-1]
        results = self.multiply(slots.view(EXPERTS, CAPACITY, -1)).view(EXPERTS * CAPACITY, -1)
        return torch.cat([results, results.new_zeros(1, self.hidden)]).gather(0, slot)


class Added(Slots):
    """Biases are added by `baddbmm`."""

    def multiply(self, slots: Tensor) -> Tensor:
        up = torch.baddbmm(self.up_bias.unsqueeze(1), slots, self.up)
        return torch.baddbmm(self.down_bias.unsqueeze(1), self.activate(up), self.down)


class AllComputed(DenseExperts):
    """Every expert computes every token, and the chosen results are gathered."""

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.choose(hidden)
        up = torch.einsum("th,ehf->tef", hidden, self.up)
        results = torch.einsum("tef,efh->teh", self.activate(up), self.down)
        chosen = results.gather(1, ids.unsqueeze(-1).expand(-1, -1, self.hidden))
        return (chosen * weights.unsqueeze(-1)).sum(1)


class AllLookedUp(DenseExperts):
    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.choose(hidden)
        rows = hidden.expand(EXPERTS, *hidden.shape)
        results = torch.bmm(self.activate(torch.bmm(rows, self.up)), self.down)
        chosen = results[ids, torch.arange(hidden.shape[0]).unsqueeze(1)]
        return (chosen * weights.unsqueeze(-1)).sum(1)


TAKEN = [Slots, TwoNumbers, FromBehind, Gathered, Added, AllComputed, AllLookedUp]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
def test_slots_that_are_read_are_computed(kind: type[DenseExperts]) -> None:
    torch.manual_seed(0)
    result = compare_layer(kind(), passes=(compute_read_slots,))
    assert expert_forms(result) == ["grouped_mm"]
    graph = result.module.graph
    (size,) = [value for node in graph_inputs(graph) if isinstance(value := fake_value(node), torch.SymInt)]
    for gemm in filter(is_grouped_gemm, graph.nodes):
        assert fake_value(gemm).shape[0].node.expr == TOP_K * size.node.expr


class ReadAsAWhole(Slots):
    def multiply(self, slots: Tensor) -> Tensor:
        results = super().multiply(slots)
        return results - results.mean(dim=1, keepdim=True)


class SlotsMeet(Slots):
    def activate(self, up: Tensor) -> Tensor:
        return super().activate(up.flip(1))


class MoreTokens(Slots):
    """More rows are read than there are slots."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(torch.cat([hidden] * 8))[: len(hidden)]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", [ReadAsAWhole, SlotsMeet, MoreTokens], ids=lambda kind: kind.__name__)
def test_unsupported_slots_remain_batches(kind: type[DenseExperts]) -> None:
    torch.manual_seed(0)
    result = compare_layer(kind(), passes=(compute_read_slots,))
    assert "grouped_mm" not in expert_forms(result)
    assert not any(map(is_grouped_gemm, result.module.graph.nodes))
