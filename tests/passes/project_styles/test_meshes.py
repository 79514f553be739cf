"""Expert parallelism over both axes of a mesh is eliminated, and every rank computes the same results.

Rows reach their experts in two hops, or experts are cut by their width and their results are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from moepass.models.reference.collectives import gather_rows, scatter_sums, sum_over_ranks
from moepass.passes.graph.collectives import communications_of
from tests.helpers.graphs.simulated_meshes import captured_on_mesh, run_mesh
from tests.helpers.graphs.simulated_ranks import hidden_rows, with_tokens
from tests.helpers.project_styles.exact_style import SplitOfStacks
from tests.helpers.project_styles.hops_style import (
    ExactByExpert,
    SlotsWithinMachineFirst,
)
from tests.helpers.project_styles.mesh_layers import CUT, MESH_LAYERS, SLOTS, banks_of_ranks
from tests.helpers.project_styles.mesh_style import (
    CutExperts,
    CutExpertsOfTokens,
    CutSlots,
)
from tests.helpers.project_styles.slots_style import IndexedSlots
from tests.helpers.project_styles.style_layers import SIZES, eliminate_readably, host_syncs
from tests.helpers.project_styles.style_sizes import StyleSizes


def check_mesh(layer: type[nn.Module], ranks: int, sizes: StyleSizes, tokens: Sequence[Sequence[int]]) -> None:
    """Check that all ranks return the same without exchanges, for each number of tokens by rank in `tokens`."""
    captured = [captured_on_mesh(layer, rank, ranks, 9, sizes) for rank in range(ranks)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    form = "all_to_all_slots" if layer in (*SLOTS, CutSlots) else "all_to_all"
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == [form], result.plan.refusals
        assert result.plan.local_blocks == results[0].plan.local_blocks
        assert not result.refusals
        assert [communication.kind for communication in communications_of(result.module.graph)] == CUT.get(layer, [])
        assert host_syncs(result) == []
    banks = banks_of_ranks(captured, results)
    for seed, each in enumerate(tokens):
        if form == "all_to_all_slots":
            each = [each[0]] * ranks
        elif layer in CUT:
            each = [each[rank // 2] for rank in range(ranks)]
        places = [rank // 2 if layer is CutExpertsOfTokens else rank for rank in range(ranks)]
        rows = [hidden_rows(sizes.hidden, n, index, sizes.dtype, seed) for index, n in zip(places, each, strict=True)]
        inputs = [with_tokens(captured_rank, of_rank) for captured_rank, of_rank in zip(captured, rows, strict=True)]
        groups = [captured_rank.groups for captured_rank in captured]
        expected = run_mesh([captured_rank.module for captured_rank in captured], inputs, groups)
        outputs = run_mesh([result.module for result in results], inputs, groups, banks)
        for (output, *_), (wanted, *_) in zip(outputs, expected, strict=True):
            tolerance = 1e-5 if sizes.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("layer", MESH_LAYERS)
def test_experts_over_both_axes_are_taken_whole_and_right(layer: type[nn.Module]) -> None:
    check_mesh(layer, 4, SIZES, [(9, 9, 9, 9), (17, 5, 2, 30), (1, 1, 40, 1)])


def check_more_machines_than_ranks_of_one(layer: type[nn.Module]) -> None:
    sizes = dataclasses.replace(SIZES, experts=12, skew=2.0)
    check_mesh(layer, 6, sizes, [(9, 9, 9, 9, 9, 9), (17, 5, 2, 30, 1, 12)])


def check_one_expert_on_each_rank(layer: type[nn.Module]) -> None:
    check_mesh(layer, 4, dataclasses.replace(SIZES, experts=4), [(9, 9, 9, 9), (1, 20, 3, 5)])


def check_bfloat16(layer: type[nn.Module]) -> None:
    check_mesh(layer, 4, dataclasses.replace(SIZES, dtype=torch.bfloat16), [(9, 9, 9, 9)])


def check_fixed_sizes(layer: type[nn.Module]) -> None:
    result = eliminate_readably(captured_on_mesh(layer, 1, 4, 12, SIZES, dynamic=False))
    assert len(result.plan.local_blocks) == 1, result.plan.refusals
    assert [communication.kind for communication in communications_of(result.module.graph)] == CUT.get(layer, [])


VARIANTS = (check_more_machines_than_ranks_of_one, check_one_expert_on_each_rank, check_bfloat16, check_fixed_sizes)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("check", VARIANTS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("layer", MESH_LAYERS)
def test_a_variant_of_every_mesh_is_taken_whole_and_right(
    layer: type[nn.Module], check: Callable[[type[nn.Module]], None]
) -> None:
    check(layer)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [ExactByExpert, SlotsWithinMachineFirst, CutExperts, CutSlots])
def test_without_a_group_of_the_whole_mesh_they_are_refused(layer: type[nn.Module]) -> None:
    captured = captured_on_mesh(layer, 2, 4, 9, SIZES)
    axes = {name: group for name, group in captured.groups.items() if group.ranks < 4}
    result = eliminate_readably(dataclasses.replace(captured, groups=axes))
    assert not result.plan.local_blocks
    (refusal,) = result.refusals
    assert "none of the 4 ranks of this mesh" in refusal.reason
    assert "torch.distributed.new_group" in refusal.reason


@pytest.mark.slow
def test_a_mesh_in_another_order_than_its_group_is_refused() -> None:
    captured = captured_on_mesh(ExactByExpert, 2, 4, 9, SIZES)
    groups = {
        name: dataclasses.replace(group, members=(1, 0, 2, 3)) if group.ranks == 4 else group
        for name, group in captured.groups.items()
    }
    result = eliminate_readably(dataclasses.replace(captured, groups=groups))
    assert "in the order of its rows or columns" in result.refusals[0].reason


class _GatheredSlots(CutSlots):
    """The ranks that hold parts of the same experts gather their slots first."""

    def compute(self, arrived: torch.Tensor) -> torch.Tensor:
        rows = gather_rows(arrived.reshape(-1, arrived.shape[-1]), 2, self.cut_name)
        outputs = IndexedSlots.compute(self, rows.view(2 * arrived.shape[0], *arrived.shape[1:]))
        return scatter_sums(outputs.reshape(-1, arrived.shape[-1]), 2, self.cut_name).view(arrived.shape)


class _WeighedParts(CutSlots):
    """The sums are scaled before they are sent back."""

    def compute(self, arrived: torch.Tensor) -> torch.Tensor:
        return super().compute(arrived) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (_GatheredSlots, "let them not gather rows first"),
        (_WeighedParts, "it sends back other outputs than its experts' for the rows"),
    ],
)
def test_other_cuts_of_experts_are_refused(layer: type[nn.Module], reason: str) -> None:
    captured = captured_on_mesh(layer, 2, 4, 9, SIZES)
    result = eliminate_readably(captured)
    (refusal,) = result.refusals
    assert reason in refusal.reason
    before, after = (list(communications_of(graph_module.graph)) for graph_module in (captured.module, result.module))
    assert [communication.kind for communication in after] == [communication.kind for communication in before]


class _AddedBehind(CutExpertsOfTokens):
    """Partial results are added up for the rank's own tokens, after their rows are returned."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(super().forward(hidden), self.cut_name)

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return SplitOfStacks._run(self, rows, counts)


@pytest.mark.slow
def test_parts_that_are_added_up_behind_the_way_back_are_nothing_special() -> None:
    captured = captured_on_mesh(_AddedBehind, 3, 4, 9, SIZES)
    result = eliminate_readably(captured)
    (block,) = result.plan.local_blocks
    assert captured.groups[block.group].members == (1, 3)
    assert not block.tokens
    assert [communication.kind for communication in communications_of(result.module.graph)] == ["all_reduce"]
