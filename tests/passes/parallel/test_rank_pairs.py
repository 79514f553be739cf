"""Ranks with different programs compute the same results after the passes, or their blocks are refused.

The graph, the constants or the parameters of one rank are changed. Then all ranks propose blocks, decide about them as
real ranks do, and run in lockstep (tests/helpers/graphs/simulated_ranks.py), which knows nothing of experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.ir.protocol import PassResult
from moepass.runtime.ranks.replicas import checksum
from tests.helpers.graphs.eliminated_graphs import complete_banks, eliminate
from tests.helpers.graphs.simulated_ranks import Captured, capture, decide, first_outputs, hidden_states, with_tokens
from tests.helpers.models.moe_stack import StackConfig
from tests.helpers.mutants.graph_mutants import EVERY_CHANGE, changes_of, finite_or_none, mutant_of
from tests.helpers.mutants.random_cases import check_cases

CONFIG = StackConfig(layers=2, hidden=16, width=16, experts=4, top_k=2)
TOKENS = 9


@functools.cache
def _captured(form: str) -> tuple[Captured, ...]:
    return tuple(capture(CONFIG, form, rank, 2, TOKENS) for rank in range(2))


@functools.cache
def _unchanged(form: str, rank: int) -> PassResult:
    return eliminate(_captured(form)[rank], {})


def _decide(form: str, ranks: Sequence[Captured]) -> list[PassResult]:
    unchanged = {id(captured_rank): rank for rank, captured_rank in enumerate(_captured(form))}

    def result(captured: Captured, leave: Mapping[str, str]) -> PassResult:
        return (
            _unchanged(form, unchanged[id(captured)])
            if id(captured) in unchanged and not leave
            else eliminate(captured, leave)
        )

    return decide(ranks, result)


def _have_equal_tokens(results: Sequence[PassResult], inputs: Sequence[Sequence[Any]]) -> bool:
    """Return the outcome of the comparison between ranks in the first run, as in `replicas.py`."""
    by_rank = []
    for result, values in zip(results, inputs, strict=True):
        names = {node.name: value for node, value in zip(graph_inputs(result.module.graph), values, strict=True)}
        needed = [names[name] for name in result.plan.replicated]
        by_rank.append([checksum(value) if isinstance(value, torch.Tensor) else value for value in needed])
    return by_rank[0] == by_rank[1]


def _outcome(form: str, ranks: Sequence[Captured], spoil: int | None = None) -> str:
    """Return the outcome for `ranks`. Input number `spoil` of rank 1 differs from that of the model."""
    results = _decide(form, ranks)
    taken = [len(result.plan.local_blocks) for result in results]
    if taken[0] != taken[1]:
        return "hung: a rank takes what another leaves"
    if not taken[0]:
        return "refused"
    names = [[block.name for block in result.plan.local_blocks] for result in results]
    if names[0] != names[1]:
        return "hung: a rank takes another block than the other"
    for seed in range(2):
        hidden = [hidden_states(CONFIG, TOKENS, 0 if form == "all_reduce" else rank, seed) for rank in range(2)]
        inputs = [with_tokens(captured_rank, values) for captured_rank, values in zip(ranks, hidden, strict=True)]
        if spoil is not None:
            inputs[1][spoil] = _spoiled(inputs[1][spoil])
        expected = finite_or_none(
            functools.partial(first_outputs, [captured_rank.module for captured_rank in ranks], inputs)
        )
        if expected is None:
            return "meaningless"
        if form == "all_reduce" and not _have_equal_tokens(results, inputs):
            return "refused in the run"
        with_inputs = [
            dataclasses.replace(captured_rank, inputs=tuple(values))
            for captured_rank, values in zip(ranks, inputs, strict=True)
        ]
        banks = complete_banks(with_inputs, results)
        modules = [result.module for result in results]
        outputs = finite_or_none(functools.partial(first_outputs, modules, inputs, banks))
        if outputs is None:
            return "hung: the graphs that were taken fail together"
        for output, wanted in zip(outputs, expected, strict=True):
            if not torch.allclose(output, wanted, rtol=1e-4, atol=1e-4):
                return "wrong"
    return "right" if taken[0] == CONFIG.layers else "right, one layer refused"


def _spoiled(value: torch.Tensor) -> torch.Tensor:
    return value.flip(0) + 0.25 if value.is_floating_point() else value + 1


def _changed(form: str, rank: int, node_index: int, how: int | str) -> str:
    ranks = list(_captured(form))
    mutant = mutant_of(ranks[rank].module, node_index, how)
    if mutant is None:
        return "no mutant"
    ranks[rank] = dataclasses.replace(ranks[rank], module=mutant)
    outcome = _outcome(form, ranks)
    assert outcome in HARMLESS
    return outcome


HARMLESS = {"right", "right, one layer refused", "refused", "refused in the run", "meaningless"}


def _parameters(form: str) -> Iterator[int]:
    captured_rank = _captured(form)[1]
    for index, value in enumerate(captured_rank.inputs):
        if isinstance(value, torch.nn.Parameter):
            yield index


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_a_rank_with_other_parameters_never_makes_results_wrong(form: str) -> None:
    """The parameters are those of routers, dense layers and experts."""
    outcomes = [_outcome(form, _captured(form), index) for index in _parameters(form)]
    assert len(outcomes) == 10
    assert set(outcomes) <= {"right", "refused in the run"}
    # In forms whose ranks may have different tokens, parameters may differ too.
    assert outcomes.count("right") == (4 if form == "all_reduce" else 10)


@pytest.mark.slow
@pytest.mark.parametrize("form", EP_FORMS)
def test_changes_of_one_rank_make_no_results_wrong(form: str) -> None:
    changes = changes_of(_captured(form)[0].module, EVERY_CHANGE)
    cases = [(form, rank, *change) for change in changes for rank in range(2)]
    check_cases(cases, _changed, 16, needed={"right", "right, one layer refused"})
