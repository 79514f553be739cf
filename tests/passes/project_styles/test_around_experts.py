"""Collectives that stand around experts and belong to other parallelism stay, and the exchanges between them go."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from moepass.passes.graph.collectives import communications_of, group_names
from moepass.passes.ir.protocol import PassResult
from moepass.runtime.execute.adoption import process_groups
from tests.helpers.graphs.simulated_ranks import (
    Captured,
    capture_module,
    hidden_rows,
    pretend_rank,
    run_ranks,
    with_tokens,
)
from tests.helpers.project_styles.mesh_style import (
    OneAxisOfMesh,
    OneAxisOfMeshWithMasks,
    SequenceParallel,
    SequenceParallelBare,
    TwoHops,
)
from tests.passes.project_styles.test_project_styles import SIZES, complete_banks, eliminated, host_syncs


def captured_on(layer: type[torch.nn.Module], rank: int, ranks: int) -> Captured:
    with pretend_rank(rank, ranks):
        model = layer(SIZES, dist.group.WORLD)  # type: ignore[call-arg]
        captured = capture_module(model, hidden_rows(SIZES.hidden, 9, rank, SIZES.dtype), rank, ranks)
        return dataclasses.replace(captured, groups=process_groups(group_names(captured.module.graph)))


def kept(result: PassResult) -> list[str]:
    return [one.kind for one in communications_of(result.module.graph)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layer", [OneAxisOfMesh, OneAxisOfMeshWithMasks])
def test_experts_on_one_axis_of_a_mesh(layer: type[torch.nn.Module]) -> None:
    captured = captured_on(layer, 3, 4)
    result = eliminated(captured)
    outer, inner = group_names(captured.module.graph)
    if "all_to_all" in {one.kind for one in communications_of(captured.module.graph) if one.group_name == outer}:
        outer, inner = inner, outer
    assert not result.refusals
    assert [(block.form, block.group) for block in result.plan.local_blocks] == [("all_to_all", inner)]
    assert [bank.expert_bounds for bank in result.plan.banks] == [(0, 4, 8)]
    assert {one.group_name for one in communications_of(result.module.graph)} == {outer}
    assert kept(result) == ["all_reduce", "all_reduce"]
    assert host_syncs(result) == []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layer", [SequenceParallel, SequenceParallelBare])
def test_sequence_parallelism_around_experts(layer: type[torch.nn.Module]) -> None:
    captured = [captured_on(layer, rank, 2) for rank in range(2)]
    results = [eliminated(one) for one in captured]
    for result in results:
        assert not result.refusals
        assert [block.form for block in result.plan.local_blocks] == ["all_to_all"]
        assert kept(result) == ["all_gather", "reduce_scatter"] * 2
    banks = complete_banks(captured, results)
    for tokens in (9, 1, 20):
        hidden = [hidden_rows(SIZES.hidden, tokens, rank, SIZES.dtype, tokens) for rank in range(2)]
        inputs = [with_tokens(one, rows) for one, rows in zip(captured, hidden, strict=True)]
        expected = run_ranks([one.module for one in captured], inputs)
        found = run_ranks([result.module for result in results], inputs, banks)
        for (output, *_), (wanted, *_) in zip(found, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_ids_on_two_hops_are_refused() -> None:
    captured = captured_on(TwoHops, 2, 4)
    result = eliminated(captured)
    assert not result.plan.banks
    (refusal,) = result.refusals
    assert "is taken on one hop only: send counts" in refusal.reason
    assert kept(result) == [one.kind for one in communications_of(captured.module.graph)]
