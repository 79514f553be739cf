"""Slots with other products, or with a number that ranks agree on."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows, max_over_ranks
from moepass.passes.graph.collectives import collective_of
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.slots_style import BatchedSlots, EqualAllToAll
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably
from tests.helpers.project_styles.style_sizes import StyleSizes, stacked_gated_experts


class EinsumExperts(BatchedSlots):
    """The slots of each expert are multiplied by einsum."""

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        owned, hidden = len(self.experts), self.sizes.hidden
        arrived = EqualAllToAll.apply(self.group, slots)  # type: ignore[no-untyped-call]
        rows = arrived.reshape(self.ranks, owned, -1, hidden).transpose(0, 1).reshape(owned, -1, hidden)
        inner = F.gelu(torch.einsum("ech,ewh->ecw", rows, self.up) + self.up_bias.unsqueeze(1))
        outputs = torch.einsum("ecw,ehw->ech", inner, self.down) + self.down_bias.unsqueeze(1)
        outputs = outputs.reshape(owned, self.ranks, -1, hidden).transpose(0, 1).reshape(self.sizes.experts, -1, hidden)
        returned: torch.Tensor = EqualAllToAll.apply(self.group, outputs)  # type: ignore[no-untyped-call]
        return returned


class EinsumOfRanks(BatchedSlots):
    """Arrived slots [ranks, experts, ...] are multiplied by einsum; the last product has no bias."""

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        arrived = EqualAllToAll.apply(self.group, slots)  # type: ignore[no-untyped-call]
        rows = arrived.reshape(self.ranks, len(self.experts), -1, self.sizes.hidden)
        inner = F.gelu(torch.einsum("rech,ewh->recw", rows, self.up) + self.up_bias.unsqueeze(1))
        outputs = torch.einsum("recw,ehw->rech", inner, self.down).reshape(slots.shape)
        returned: torch.Tensor = EqualAllToAll.apply(self.group, outputs)  # type: ignore[no-untyped-call]
        return returned


class AgreedCapacity(ExactLayer):
    """Nothing is dropped: the host reads the largest number of slots that any rank needs for any expert."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.gate, self.up, self.down = stacked_gated_experts(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        owned, width = len(self.owned), hidden.shape[1]
        weights, chosen = self.router(hidden).topk(self.sizes.top_k, dim=-1)
        mask = F.one_hot(chosen.reshape(-1), self.sizes.experts)
        most = max_over_ranks(mask.sum(dim=0).max().reshape(1), self.group_name)
        capacity = self._slots(int(most.item()))
        slot = chosen.reshape(-1) * capacity + ((mask.cumsum(dim=0) - 1) * mask).sum(dim=1)
        slots = hidden.new_zeros(self.sizes.experts * capacity, width)
        slots = slots.index_put((slot,), hidden.repeat_interleave(self.sizes.top_k, dim=0))
        equal = [owned * capacity] * self.ranks
        arrived = exchange_rows(slots, equal, equal, self.group_name).view(self.ranks, owned, capacity, width)
        rows = arrived.transpose(0, 1).reshape(owned, self.ranks * capacity, width)
        inner = F.silu(torch.bmm(rows, self.gate.transpose(1, 2))) * torch.bmm(rows, self.up.transpose(1, 2))
        outputs = torch.bmm(inner, self.down.transpose(1, 2)).view(owned, self.ranks, capacity, width)
        back = exchange_rows(outputs.transpose(0, 1).reshape(-1, width), equal, equal, self.group_name)
        result: torch.Tensor = (back[slot].view(*chosen.shape, width) * weights.unsqueeze(-1)).sum(dim=1)
        return result

    def _slots(self, most: int) -> int:
        torch._check(most >= 1)
        return most


class RoundedCapacity(AgreedCapacity):
    """A capacity rounded up to a multiple of eight."""

    def _slots(self, most: int) -> int:
        return (super()._slots(most) + 7) // 8 * 8


class TwoLayers(nn.Module):
    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.Sequential(BatchedSlots(sizes, group), BatchedSlots(sizes, group))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(hidden)
        return result


def check_slots(layer: type[nn.Module], ranks: int, kinds: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
    """Check that only collectives of `kinds` remain, and that all ranks return the same for `tokens` by rank."""
    captured = [capture_layer(functools.partial(layer, SIZES), rank, ranks) for rank in range(ranks)]
    results = [eliminate_readably(rank) for rank in captured]
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all_slots"], result.plan.refusals
        assert collective_kinds(result) == kinds
    check_same_outputs(captured, results, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [EinsumExperts, EinsumOfRanks])
def test_slots_multiplied_by_einsum(layer: type[nn.Module]) -> None:
    check_slots(layer, 2, [], [(9, 9), (40, 40), (1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [RoundedCapacity, AgreedCapacity])
def test_as_many_slots_as_any_rank_needs(layer: type[nn.Module]) -> None:
    check_slots(layer, 2, ["all_reduce"], [(9, 9), (40, 3), (1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [EinsumExperts, EinsumOfRanks])
def test_slots_multiplied_by_einsum_on_four_ranks(layer: type[nn.Module]) -> None:
    check_slots(layer, 4, [], [(9, 9, 9, 9), (40, 40, 40, 40)])


@pytest.mark.slow
def test_a_layer_may_send_the_slots_that_the_layer_before_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of an exchange is then outside the block that the exchange belongs to."""
    # Both layers are proved, although they have the same text.
    module = importlib.import_module("moepass.passes.parallel.eliminate_expert_parallelism")
    monkeypatch.setattr(module, "block_text", lambda *parts: object())
    captured = [capture_layer(functools.partial(TwoLayers, SIZES), rank, 2, dynamic=False) for rank in range(2)]
    for captured_rank in captured:
        graph = captured_rank.module.graph
        # Each layer exchanges slots and results.
        exchanges = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default)
        first, second = collective_of(exchanges[1]), collective_of(exchanges[2])
        assert first is not None
        assert second is not None
        second.node.replace_input_with(second.input, first.result)
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    for result in results:
        assert len(result.plan.banks) == 2, result.plan.refusals
        assert collective_kinds(result) == []
    check_same_outputs(captured, results, [(9, 9)])
