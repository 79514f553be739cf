"""Graphs of ranks on a mesh, changed at one node: blocks are taken correctly or refused, without deadlocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs.simulated_meshes import captured_on_mesh, decide_on_mesh, run_mesh
from tests.helpers.graphs.simulated_ranks import Captured, hidden_rows, with_tokens
from tests.helpers.mutants.graph_mutants import EVERY_CHANGE, changes_of, finite_or_none, mutant_of
from tests.helpers.mutants.random_cases import check_cases
from tests.helpers.project_styles.mesh_layers import MESH_LAYERS, banks_of_ranks
from tests.helpers.project_styles.mesh_style import CutExpertsOfTokens
from tests.helpers.project_styles.style_layers import SIZES, eliminate_style

RANKS = 4
TOKENS = 9
LAYERS = {layer.__name__: layer for layer in MESH_LAYERS}


@functools.cache
def _captured(name: str) -> list[Captured]:
    return [captured_on_mesh(LAYERS[name], rank, RANKS, TOKENS, SIZES) for rank in range(RANKS)]


@functools.cache
def _unchanged(name: str, rank: int, leave: tuple[tuple[str, str], ...]) -> PassResult:
    return eliminate_style(_captured(name)[rank], dict(leave))


def _first_outputs(ranks: Sequence[Captured], inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [
        outputs[0]
        for outputs in run_mesh(
            [captured_rank.module for captured_rank in ranks], inputs, [captured_rank.groups for captured_rank in ranks]
        )
    ]


def check_mutant(name: str, node_index: int, how: int | str, changed_ranks: Collection[int]) -> str:
    """Return the outcome for node number `node_index`, changed in way `how` on `changed_ranks`."""
    ranks = list(_captured(name))
    for rank in changed_ranks:
        mutant = mutant_of(ranks[rank].module, node_index, how)
        if mutant is None:
            return "no mutant"
        ranks[rank] = dataclasses.replace(ranks[rank], module=mutant)
    alike: type[nn.Module] = CutExpertsOfTokens
    expected = []
    for seed in range(2):
        places = [rank // 2 if LAYERS[name] is alike else rank for rank in range(RANKS)]
        hidden = [hidden_rows(SIZES.hidden, TOKENS, at, SIZES.dtype, seed) for at in places]
        inputs = [with_tokens(captured_rank, rows) for captured_rank, rows in zip(ranks, hidden, strict=True)]
        expected.append((inputs, finite_or_none(functools.partial(_first_outputs, ranks, inputs))))
    if any(wanted is None for _, wanted in expected):
        return "meaningless"

    def eliminate(rank: int, leave: Mapping[str, str]) -> PassResult:
        if rank in changed_ranks:
            return eliminate_style(ranks[rank], leave)
        return _unchanged(name, rank, tuple(leave.items()))

    results = decide_on_mesh(ranks, eliminate)
    taken = [[block.name for block in result.plan.local_blocks] for result in results]
    assert taken == [taken[0]] * RANKS, "a rank takes what another leaves"
    if not taken[0]:
        return "refused"
    banks = banks_of_ranks(ranks, results)
    for inputs, wanted in expected:
        outputs = run_mesh(
            [result.module for result in results], inputs, [captured_rank.groups for captured_rank in ranks], banks
        )
        for (output, *_), of_rank in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(output, of_rank, rtol=1e-4, atol=1e-4)
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_mutants_of_a_mesh_are_taken_rightly_or_refused(name: str) -> None:
    """Nodes are changed on all ranks or on some of them."""
    changes = changes_of(_captured(name)[0].module, EVERY_CHANGE)
    cases = [(name, *change, ranks) for change in changes for ranks in (range(RANKS), [0], [1], [2, 3], [1, 3])]
    check_cases(cases, check_mutant, 2, needed={"refused", "right"})
