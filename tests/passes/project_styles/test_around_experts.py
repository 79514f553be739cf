"""Collectives of other parallelism around experts remain, and the exchanges between them are eliminated."""

from __future__ import annotations

import functools

import pytest
import torch

from moepass.passes.graph.collectives import communications_of, group_names
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_ranks import Captured
from tests.helpers.project_styles.mesh_style import (
    ExpertsCutByWidth,
    OneAxisOfMesh,
    OneAxisOfMeshWithMasks,
    SequenceParallel,
    SequenceParallelBare,
    SlotsInTwoHops,
)
from tests.helpers.project_styles.style_layers import SIZES, capture_layer, eliminate_readably, host_syncs


def _captured(layer: type[torch.nn.Module], rank: int, ranks: int) -> Captured:
    return capture_layer(functools.partial(layer, SIZES), rank, ranks)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layer", [OneAxisOfMesh, OneAxisOfMeshWithMasks])
def test_experts_on_one_axis_of_a_mesh(layer: type[torch.nn.Module]) -> None:
    captured = _captured(layer, 3, 4)
    result = eliminate_readably(captured)
    outer, inner = group_names(captured.module.graph)
    if "all_to_all" in {
        communication.kind
        for communication in communications_of(captured.module.graph)
        if communication.group_name == outer
    }:
        outer, inner = inner, outer
    assert not result.refusals
    assert [(block.form, block.group) for block in result.plan.local_blocks] == [("all_to_all", inner)]
    assert [bank.expert_bounds for bank in result.plan.banks] == [(0, 4, 8)]
    assert {communication.group_name for communication in communications_of(result.module.graph)} == {outer}
    assert collective_kinds(result) == ["all_reduce", "all_reduce"]
    assert host_syncs(result) == []


@pytest.mark.slow
@pytest.mark.parametrize("layer", [SequenceParallel, SequenceParallelBare])
def test_sequence_parallelism_around_experts(layer: type[torch.nn.Module]) -> None:
    captured = [_captured(layer, rank, 2) for rank in range(2)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    for result in results:
        assert not result.refusals
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"]
        assert collective_kinds(result) == ["all_gather", "reduce_scatter"] * 2
    check_same_outputs(captured, results, [(9, 9), (1, 1), (20, 20)])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (SlotsInTwoHops, "its rows come in two hops"),
        (ExpertsCutByWidth, "adds up its results over another process group"),
    ],
)
def test_experts_over_both_axes_of_a_mesh_are_refused(layer: type[torch.nn.Module], reason: str) -> None:
    captured = _captured(layer, 2, 4)
    result = eliminate_readably(captured)
    assert not result.plan.banks
    (refusal,) = result.refusals
    assert reason in refusal.reason
    assert collective_kinds(result) == collective_kinds(captured)
