"""Graphs in the styles of other projects, changed at one node: blocks are taken correctly or refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import pytest
import torch

from moepass.passes.ir.protocol import PassResult
from tests.helpers.graphs.eliminated_graphs import complete_banks
from tests.helpers.graphs.simulated_ranks import Captured, decide, first_outputs, hidden_rows, run_ranks, with_tokens
from tests.helpers.mutants.graph_mutants import (
    EVERY_CHANGE,
    changes_of,
    finite_or_none,
    mutant_of,
)
from tests.helpers.mutants.random_cases import check_cases
from tests.helpers.project_styles.style_layers import SIZES, STYLES, capture_style, eliminate_style

RANKS = 2


@functools.cache
def _captured(style: str) -> list[Captured]:
    return [capture_style(style, rank, RANKS) for rank in range(RANKS)]


@functools.cache
def _unchanged(style: str, rank: int) -> PassResult:
    return eliminate_style(_captured(style)[rank], {})


def _decide(style: str, ranks: Sequence[Captured]) -> list[PassResult]:
    unchanged = {id(captured_rank): rank for rank, captured_rank in enumerate(_captured(style))}

    def result(captured: Captured, leave: Mapping[str, str]) -> PassResult:
        return (
            _unchanged(style, unchanged[id(captured)])
            if id(captured) in unchanged and not leave
            else eliminate_style(captured, leave)
        )

    return decide(ranks, result)


def check_mutant(style: str, node_index: int, how: int | str, ranks: Collection[int] = range(RANKS)) -> str:
    """Return the outcome for node number `node_index`, changed in way `how` on `ranks`."""
    changed = list(_captured(style))
    for rank in ranks:
        mutant = mutant_of(changed[rank].module, node_index, how)
        if mutant is None:
            return "no mutant"
        changed[rank] = dataclasses.replace(changed[rank], module=mutant)
    results = _decide(style, changed)
    taken = [[block.name for block in result.plan.local_blocks] for result in results]
    assert taken[0] == taken[1], "a rank takes what another leaves"
    banks = complete_banks(changed, results) if taken[0] else {}
    for seed in range(2):
        hidden = [hidden_rows(SIZES.hidden, 9, rank, SIZES.dtype, seed) for rank in range(RANKS)]
        inputs = [with_tokens(captured_rank, rows) for captured_rank, rows in zip(changed, hidden, strict=True)]
        expected = finite_or_none(functools.partial(first_outputs, [rank.module for rank in changed], inputs))
        if expected is None:
            return "meaningless"
        if not taken[0]:
            return "refused"
        outputs = run_ranks([result.module for result in results], inputs, banks)
        for (output, *_), wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_mutants_are_taken_rightly_or_refused(style: str) -> None:
    """Nodes are changed on both ranks or on one of them."""
    changes = changes_of(_captured(style)[0].module, EVERY_CHANGE)
    cases = [(style, *change, ranks) for change in changes for ranks in (range(RANKS), [0], [1])]
    check_cases(cases, check_mutant, 4, needed={"refused", "right"})
