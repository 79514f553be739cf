"""Graphs in the styles of other projects, changed at one node: taken rightly or refused, and never wrong."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import pytest
import torch
from graph_mutants import FLOAT_CHANGES, INT_CHANGES, mutate, mutate_values
from simulated_ranks import Captured, hidden_rows, run_ranks, with_tokens
from test_project_styles import PASSES, SIZES, STYLES, captured_style, complete_banks
from torch.fx import GraphModule

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, run_passes

RANKS = 2
VALUE_CHANGES = (*FLOAT_CHANGES, *INT_CHANGES, "flag", "constant")


@functools.cache
def _captured(style: str) -> list[Captured]:
    return [captured_style(style, rank, RANKS, 9, SIZES, dynamic=True) for rank in range(RANKS)]


def _mutant(module: GraphModule, place: int, how: int | str) -> GraphModule | None:
    return mutate(module, place, how) if isinstance(how, int) else mutate_values(module, place, how)


def _run(modules: list[GraphModule], inputs: list[list[Any]], banks: dict[int, list[torch.Tensor]]) -> Any:
    """What the ranks give; None where they give nothing, or nothing finite, as from memory that nobody wrote."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills such memory with NaN
    try:
        outputs = [found[0] for found in run_ranks(modules, inputs, banks)]
    except Exception:
        return None
    finally:
        torch.use_deterministic_algorithms(False)
    return outputs if all(bool(torch.isfinite(output).all()) for output in outputs) else None


def check_mutant(style: str, place: int, how: int | str) -> str:
    captured = _captured(style)
    mutants = [_mutant(one.module, place, how) for one in captured]
    if any(mutant is None for mutant in mutants):
        return "no mutant"
    changed = [dataclasses.replace(one, module=mutant) for one, mutant in zip(captured, mutants, strict=True)]
    results: list[PassResult] = [
        run_passes(PASSES, one.module, Plan(), PassContext(groups=one.groups)) for one in changed
    ]
    taken = [bool(result.plan.banks) for result in results]
    if any(taken) != all(taken):
        return "refused"  # the ranks agree on what is taken
    banks = complete_banks(changed, results) if all(taken) else {}
    for seed in range(2):
        hidden = [hidden_rows(SIZES.hidden, 9, rank, SIZES.dtype, seed) for rank in range(RANKS)]
        inputs = [with_tokens(one, rows) for one, rows in zip(changed, hidden, strict=True)]
        expected = _run([one.module for one in changed], inputs, {})
        if expected is None:
            return "meaningless"
        outputs = run_ranks([result.module for result in results], inputs, banks)
        for (output, *_), wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
    return "right" if all(taken) else "refused"


def check_style(style: str, ways: tuple[int | str, ...], step: int) -> collections.Counter[str]:
    nodes = sum(node.op == "call_function" for node in _captured(style)[0].module.graph.nodes)
    cases = [(place, how) for place in range(nodes) for how in ways][::step]
    outcomes: collections.Counter[str] = collections.Counter()
    for place, how in cases:
        try:
            outcomes[check_mutant(style, place, how)] += 1
        except AssertionError as error:
            raise AssertionError(f"{style}: node {place} changed in way {how}") from error
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("style", STYLES)
def test_every_mutant_is_taken_rightly_or_refused(style: str) -> None:
    outcomes = check_style(style, (*range(5), *VALUE_CHANGES), 1)
    assert outcomes["refused"] > 20
    assert outcomes["right"] > 20
