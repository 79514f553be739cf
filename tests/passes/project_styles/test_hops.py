"""Rows that reach their experts in two hops over a mesh: taken whole, and every rank computes what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from simulated_meshes import captured_on_mesh, run_mesh
from simulated_ranks import hidden_rows, with_tokens
from test_project_styles import SIZES, complete_banks, eliminated, host_syncs
from torch import nn

from moepass.models.testing.project_styles.hops_style import (
    ExactBetweenMachinesFirst,
    ExactByExpert,
    ExactWithinMachineFirst,
    SlotsBetweenMachinesFirst,
    SlotsWithinMachineFirst,
)
from moepass.models.testing.project_styles.style_sizes import StyleSizes
from moepass.passes.graph.collectives import communications_of

SLOTS = (SlotsBetweenMachinesFirst, SlotsWithinMachineFirst)
EXACT = (ExactBetweenMachinesFirst, ExactByExpert, ExactWithinMachineFirst)


def check_hops(layer: type[nn.Module], ranks: int, sizes: StyleSizes, tokens: Sequence[Sequence[int]]) -> None:
    """All ranks together give the same without exchanges, for each of `tokens` by rank."""
    captured = [captured_on_mesh(layer, rank, ranks, 9, sizes) for rank in range(ranks)]
    results = [eliminated(one) for one in captured]
    form = "all_to_all_slots" if layer in SLOTS else "all_to_all"
    for result in results:
        assert [block.form for block in result.plan.local_blocks] == [form], result.plan.refusals
        assert result.plan.local_blocks == results[0].plan.local_blocks
        assert not result.refusals
        assert not list(communications_of(result.module.graph))
        assert host_syncs(result) == []
    banks = complete_banks(captured, results)
    for seed, each in enumerate(tokens):
        of_ranks = [each[0]] * ranks if layer in SLOTS else each
        rows = [hidden_rows(sizes.hidden, n, rank, sizes.dtype, seed) for rank, n in enumerate(of_ranks)]
        inputs = [with_tokens(one, of_rank) for one, of_rank in zip(captured, rows, strict=True)]
        groups = [one.groups for one in captured]
        expected = run_mesh([one.module for one in captured], inputs, groups)
        found = run_mesh([result.module for result in results], inputs, groups, [banks] * ranks)
        for (output, *_), (wanted, *_) in zip(found, expected, strict=True):
            tolerance = 1e-5 if sizes.dtype == torch.float32 else 2e-2
            torch.testing.assert_close(output, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layer", [*SLOTS, *EXACT])
def test_rows_in_two_hops_are_taken_whole_and_right(layer: type[nn.Module]) -> None:
    check_hops(layer, 4, SIZES, [(9, 9, 9, 9), (17, 5, 2, 30), (1, 1, 40, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [*SLOTS, *EXACT])
def test_more_machines_than_ranks_of_one(layer: type[nn.Module]) -> None:
    sizes = dataclasses.replace(SIZES, experts=12, skew=2.0)
    check_hops(layer, 6, sizes, [(9, 9, 9, 9, 9, 9), (17, 5, 2, 30, 1, 12)])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [*SLOTS, *EXACT])
def test_one_expert_on_each_rank_of_a_mesh(layer: type[nn.Module]) -> None:
    check_hops(layer, 4, dataclasses.replace(SIZES, experts=4), [(9, 9, 9, 9), (1, 20, 3, 5)])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [*SLOTS, *EXACT])
def test_two_hops_in_bfloat16(layer: type[nn.Module]) -> None:
    check_hops(layer, 4, dataclasses.replace(SIZES, dtype=torch.bfloat16), [(9, 9, 9, 9)])
