"""Collectives of other parallelism around experts remain, and the exchanges between them are eliminated."""

from __future__ import annotations

import pytest
import torch

from moepass.passes.graph.collectives import communications_of, group_names
from tests.helpers.graphs.eliminated_graphs import check_same_outputs, collective_kinds
from tests.helpers.graphs.simulated_meshes import captured_on_mesh
from tests.helpers.project_styles.mesh_style import (
    OneAxisOfMesh,
    OneAxisOfMeshWithMasks,
    SequenceParallel,
    SequenceParallelBare,
    TwoHops,
)
from tests.helpers.project_styles.style_layers import SIZES, eliminate_readably, host_syncs


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layer", [OneAxisOfMesh, OneAxisOfMeshWithMasks])
def test_experts_on_one_axis_of_a_mesh(layer: type[torch.nn.Module]) -> None:
    captured = captured_on_mesh(layer, 3, 4, 9, SIZES)
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
    captured = [captured_on_mesh(layer, rank, 2, 9, SIZES) for rank in range(2)]
    results = [eliminate_readably(captured_rank) for captured_rank in captured]
    for result in results:
        assert not result.refusals
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"]
        assert collective_kinds(result) == ["all_gather", "reduce_scatter"] * 2
    check_same_outputs(captured, results, [(9, 9), (1, 1), (20, 20)])


@pytest.mark.slow
def test_ids_on_two_hops_are_refused() -> None:
    captured = captured_on_mesh(TwoHops, 2, 4, 9, SIZES)
    result = eliminate_readably(captured)
    assert not result.plan.banks
    (refusal,) = result.refusals
    assert "Ids of experts must not travel with rows" in refusal.reason
    assert collective_kinds(result) == collective_kinds(captured)
