"""Expert parallelism in the styles of other projects: taken out whole, and every rank computes what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moepass.passes.dense.group_exchanged_slots import group_exchanged_slots
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import graph_inputs, is_call
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.protocol import Group, PassContext, PassResult, run_passes
from moepass.passes.ir.shards import shard_layout
from moepass.passes.ir.slot_operations import gather
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.parallel.merge_low_rank import merge_low_rank, split_low_rank
from moepass.passes.slots.compute_read_slots import compute_read_slots
from moepass.passes.slots.leave_out_padding import leave_out_padding
from moepass.passes.slots.look_up_one_hots import look_up_one_hots
from moepass.runtime.banks.banks import write_parts
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture_module,
    hidden_rows,
    pretend_rank,
    run_ranks,
    run_with_banks,
    with_tokens,
)
from tests.helpers.project_styles.converted_style import FlatWeights, MasterWeights, ScaledModules
from tests.helpers.project_styles.exact_style import SlicesOfModules, SplitOfStacks
from tests.helpers.project_styles.gathered_style import DroppingMasks, GatheredMasks, GatheredOrder
from tests.helpers.project_styles.ids_style import GlobalIdsTravel, LocalIdsTravel
from tests.helpers.project_styles.low_rank_style import LowRankModules
from tests.helpers.project_styles.megatron_style import MaskedDispatch
from tests.helpers.project_styles.overlap_style import OverlappedHalves, OverlappedModules
from tests.helpers.project_styles.padded_style import (
    ModulesThatPad,
    PaddedByJoin,
    PaddedByScatter,
    PaddedBySearch,
    PaddedByTable,
)
from tests.helpers.project_styles.slots_style import BatchedSlots, EinsumSlots, IndexedSlots
from tests.helpers.project_styles.style_sizes import StyleSizes

STYLES: dict[str, tuple[type[nn.Module], str]] = {
    "gshard": (EinsumSlots, "all_to_all_slots"),
    "deepspeed": (IndexedSlots, "all_to_all_slots"),
    "batched slots": (BatchedSlots, "all_to_all_slots"),
    "deepseek": (SlicesOfModules, "all_to_all"),
    "torchtitan loop": (SplitOfStacks, "all_to_all"),
    "megatron": (MaskedDispatch, "all_to_all"),
    "megatron gathered": (GatheredMasks, "all_gather"),
    "gathered order": (GatheredOrder, "all_gather"),
    "gathered with drops": (DroppingMasks, "all_gather"),
    "master weights": (MasterWeights, "all_to_all"),
    "flat weights": (FlatWeights, "all_to_all"),
    "scaled modules": (ScaledModules, "all_to_all"),
    "low rank": (LowRankModules, "all_to_all"),
    "global ids": (GlobalIdsTravel, "all_to_all_ids"),
    "local ids": (LocalIdsTravel, "all_to_all_own_ids"),
    "overlapped halves": (OverlappedHalves, "all_to_all"),
    "overlapped modules": (OverlappedModules, "all_to_all"),
    "padded by search": (PaddedBySearch, "all_to_all"),
    "padded by table": (PaddedByTable, "all_to_all"),
    "padded by scatter": (PaddedByScatter, "all_to_all"),
    "padded by join": (PaddedByJoin, "all_to_all"),
    "modules that pad": (ModulesThatPad, "all_to_all"),
}
# Where all ranks must bring as many tokens.
EVEN_FORMS = ("all_to_all_slots", "all_gather")
# In the fast tests: slots, exact sizes, and weights that travel, or are gathered, and ids that travel.
_SOON = ("deepspeed", "deepseek", "megatron", "megatron gathered", "local ids")
PASSES = (
    sort_masks, leave_out_padding, write_grouped_gemms, group_exchanged_slots, merge_low_rank,
    eliminate_expert_parallelism, split_low_rank, look_up_one_hots, compute_read_slots,
)  # fmt: skip
SIZES = StyleSizes()


def captured_style(style: str, rank: int, ranks: int, tokens: int, sizes: StyleSizes, *, dynamic: bool) -> Captured:
    with pretend_rank(rank, ranks):
        layer = STYLES[style][0](sizes, dist.group.WORLD)  # type: ignore[call-arg]
        return capture_module(layer, hidden_rows(sizes.hidden, tokens, rank, sizes.dtype), rank, ranks, dynamic=dynamic)


def eliminated(captured: Captured) -> PassResult:
    result = run_passes(PASSES, captured.module, Plan(), PassContext(groups=captured.groups))
    check_readable(result.refusals)
    return result


def complete_banks(captured: Sequence[Captured], results: Sequence[PassResult]) -> dict[int, list[torch.Tensor]]:
    """The tensors of every bank, of the parameters that the graphs of all ranks give to its gather."""
    banks: dict[int, list[torch.Tensor]] = {}
    for bank in results[0].plan.banks:
        # Each rank makes its part by its own recipes.
        parts = [
            _parts_of(of_rank[1].plan.bank(bank.index), *of_rank) for of_rank in zip(captured, results, strict=True)
        ]
        banks[bank.index] = [torch.cat(of_tensor) for of_tensor in zip(*parts, strict=True)]
    return banks


def _parts_of(bank: BankSpec, captured: Captured, result: PassResult) -> list[torch.Tensor]:
    values = dict(zip((node.name for node in graph_inputs(captured.module.graph)), captured.inputs, strict=True))
    # Two halves of a batch may gather the same bank.
    call = next(
        node for node in result.module.graph.nodes if is_call(node, gather) and node.kwargs["bank"] == bank.index
    )
    given: list[Any] = [values[node.name] for node in call.all_input_nodes]
    rank = captured.groups[bank.group].rank
    layout = shard_layout(bank, rank)
    shard = torch.empty(layout.nbytes, dtype=torch.uint8)
    write_parts(bank, rank, given, shard)
    return [tensor.view(shard) for tensor in layout.tensors]


def host_syncs(result: PassResult) -> list[str]:
    waits = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")
    return [node.name for node in result.module.graph.nodes if str(node.target).startswith(waits)]


def check_style(style: str, ranks: int, sizes: StyleSizes, tokens: Sequence[Sequence[int]]) -> None:
    """All ranks together give the same without exchanges, for each of `tokens` by rank."""
    captured = [captured_style(style, rank, ranks, 9, sizes, dynamic=True) for rank in range(ranks)]
    results = [eliminated(one) for one in captured]
    for result in results:
        assert {block.form for block in result.plan.local_blocks} == {STYLES[style][1]}, result.plan.refusals
        assert not list(communications_of(result.module.graph))
        assert host_syncs(result) == []
    banks = complete_banks(captured, results)
    for seed, each in enumerate(tokens):
        of_ranks = [each[0]] * ranks if STYLES[style][1] in EVEN_FORMS else each
        rows = [hidden_rows(sizes.hidden, n, rank, sizes.dtype, seed) for rank, n in enumerate(of_ranks)]
        inputs = [with_tokens(one, of_rank) for one, of_rank in zip(captured, rows, strict=True)]
        expected = run_ranks([one.module for one in captured], inputs)
        for rank, (result, given) in enumerate(zip(results, inputs, strict=True)):
            found = run_with_banks(result.module, given, banks)
            tolerance = 1e-5 if sizes.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found[0], expected[rank][0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "style", [*_SOON, *(pytest.param(style, marks=pytest.mark.slow) for style in STYLES if style not in _SOON)]
)
def test_a_style_is_taken_whole_and_right(style: str) -> None:
    check_style(style, 2, SIZES, [(9, 9), (17, 5), (1, 30), (40, 40)])


def test_counts_may_come_over_another_group_of_the_same_ranks() -> None:
    captured = captured_style("megatron", 0, 2, 9, SIZES, dynamic=True)
    (name,) = captured.groups
    (count,) = (one.node for one in communications_of(captured.module.graph) if one.kind == "all_gather")
    count.args = tuple("counts" if argument == name else argument for argument in count.args)
    for members in ((5, 4), (4, 6), (), (4, 5)):
        groups = {name: Group(0, 2, (4, 5)), "counts": Group(0, 2, members)}
        result = eliminated(dataclasses.replace(captured, groups=groups))
        is_taken = members == (4, 5)
        assert bool(result.plan.local_blocks) == is_taken, members
        assert bool(list(communications_of(result.module.graph))) != is_taken, members
        assert bool(result.refusals) != is_taken, members


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_on_four_ranks_and_with_skew(style: str) -> None:
    check_style(style, 4, dataclasses.replace(SIZES, skew=3.0), [(9, 4, 33, 12), (2, 2, 2, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_in_bfloat16(style: str) -> None:
    check_style(style, 2, dataclasses.replace(SIZES, dtype=torch.bfloat16), [(9, 9), (33, 6)])


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_with_fixed_sizes(style: str) -> None:
    captured = captured_style(style, 0, 2, 12, SIZES, dynamic=False)
    result = eliminated(captured)
    assert {block.form for block in result.plan.local_blocks} == {STYLES[style][1]}, result.plan.refusals
    assert not list(communications_of(result.module.graph))


@pytest.mark.slow
# A batch of one expert is no batch of experts.
@pytest.mark.parametrize("style", [style for style in STYLES if style != "batched slots"])
def test_one_expert_on_each_rank(style: str) -> None:
    check_style(style, 4, dataclasses.replace(SIZES, experts=4), [(9, 4, 33, 12)])
