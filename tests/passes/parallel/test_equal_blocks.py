"""Blocks with equal texts share one proof; the text contains everything that a proof depends on."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import pytest
from torch.fx import GraphModule

from moepass.models.reference.expert_parallel import EP_FORMS
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import Captured, capture
from tests.helpers.models.moe_stack import StackConfig
from tests.helpers.mutants.graph_mutants import changes_of, mutant_of
from tests.helpers.mutants.random_cases import check_cases

# The package's attribute of that name is the pass, so the module is imported by name.
MODULE = importlib.import_module("moepass.passes.parallel.eliminate_expert_parallelism")
LAYERS = 3


@functools.cache
def _captured(form: str, dynamic: bool) -> Captured:
    config = StackConfig(layers=LAYERS, hidden=16, width=16, experts=5, top_k=2)
    return capture(config, form, 0, 2, 9, dynamic=dynamic)


class _Proofs:
    """Counts proofs, and can give every block a different text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
        self.count = 0
        prove, text = MODULE.check_local_form, MODULE.block_text

        def counted(*parts: Any) -> None:
            self.count += 1
            prove(*parts)

        monkeypatch.setattr(MODULE, "check_local_form", counted)
        monkeypatch.setattr(MODULE, "block_text", lambda *parts: text(*parts) if share else object())


def _outcome(module: GraphModule, captured: Captured) -> tuple[list[str], list[str]]:
    result = eliminate(dataclasses.replace(captured, module=module))
    return [bank.name for bank in result.plan.banks], [refusal.reason for refusal in result.plan.refusals]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("form", EP_FORMS)
def test_equal_layers_are_proved_once(form: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = _Proofs(monkeypatch, share=True)
    captured = _captured(form, dynamic)
    banks, refused = _outcome(captured.module, captured)
    assert len(banks) == LAYERS
    assert refused == []
    # In a dynamic graph, one layer contains the size arithmetic that all layers share.
    assert proofs.count in ((1, 2) if dynamic else (1,))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("form", EP_FORMS)
def test_no_layer_that_was_changed_passes_for_another(form: str, dynamic: bool) -> None:
    """Changed graphs have the same outcomes with and without shared proofs."""
    captured = _captured(form, dynamic)

    def check(node_index: int, how: int | str) -> str:
        mutant = mutant_of(captured.module, node_index, how)
        if mutant is None:
            return "no mutant"
        outcomes = []
        for share in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                _Proofs(patch, share)
                outcomes.append(_outcome(mutant, captured))
        assert outcomes[0] == outcomes[1]
        return "the same"

    check_cases(changes_of(captured.module, range(5)), check, 6, needed={"the same"})
