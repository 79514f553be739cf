"""Layers of dense experts, changed at one node: chosen pairs are computed rightly, or all as before."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from captured_layers import tokens
from graph_mutants import FLOAT_CHANGES, INT_CHANGES, mutate, mutate_values
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.models.testing.project_styles.dense_experts import TAKEN
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.dense.compute_chosen_pairs import compute_chosen_pairs
from moepass.passes.graph.nodes import fake_value, graph_inputs
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.runtime.lowering.lower_segments import decompositions

LAYERS = {kind.__name__: kind for kind in TAKEN}
WAYS: tuple[int | str, ...] = (*range(4), *FLOAT_CHANGES, *INT_CHANGES, "flag", "constant")


@functools.cache
def _captured(name: str) -> tuple[GraphModule, list[tuple[Any, ...]]]:
    """The graph of a layer, and what it was called with for several numbers of tokens."""
    modules: list[GraphModule] = []
    inputs: list[tuple[Any, ...]] = []

    def keep(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        modules.append(module)

        def run(given: list[Any]) -> Any:
            inputs.append(tuple(given))
            return module.forward(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch.manual_seed(0)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, decompositions=decompositions("eager"))
    with torch.no_grad():
        compiled = torch.compile(LAYERS[name]().eval(), backend=backend, dynamic=True, fullgraph=True)
        for number in (11, 4, 23):
            compiled(tokens(number))
    (module,) = modules
    return module, inputs


def _run(module: GraphModule, inputs: tuple[Any, ...]) -> torch.Tensor | None:
    """None where it gives nothing, or nothing finite, as from memory that nobody wrote."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills such memory with NaN
    try:
        (output,) = module.forward(*inputs)
    except Exception:
        return None
    finally:
        torch.use_deterministic_algorithms(False)
    return output if bool(torch.isfinite(output).all()) else None


@torch.no_grad()
def check_mutant(name: str, place: int, how: int | str) -> str:
    module, all_inputs = _captured(name)
    mutant = mutate(module, place, how) if isinstance(how, int) else mutate_values(module, place, how)
    sizes = [value for node in graph_inputs(module.graph) if isinstance(value := fake_value(node), torch.SymInt)]
    if any(size.node.expr.is_number for size in sizes):
        _captured.cache_clear()  # what was written took the number of tokens for a constant
        return "no mutant"
    if mutant is None:
        return "no mutant"
    written = run_passes((compute_chosen_pairs,), mutant, Plan(), PassContext()).module
    for inputs in all_inputs:
        expected = _run(mutant, inputs)
        if expected is None:
            return "meaningless"
        torch.testing.assert_close(written.forward(*inputs)[0], expected, rtol=1e-4, atol=1e-4)
    return "right" if any(map(is_grouped_gemm, written.graph.nodes)) else "left"


def check_layer(name: str, step: int) -> collections.Counter[str]:
    nodes = sum(node.op == "call_function" for node in _captured(name)[0].graph.nodes)
    outcomes: collections.Counter[str] = collections.Counter()
    for place, how in [(place, how) for place in range(nodes) for how in WAYS][::step]:
        try:
            outcomes[check_mutant(name, place, how)] += 1
        except Exception as error:
            raise AssertionError(f"{name}: node {place} changed in way {how}") from error
    return outcomes


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYERS)
def test_every_mutant_is_computed_rightly_or_left(name: str) -> None:
    outcomes = check_layer(name, 1)
    assert outcomes["left"] > 10
    assert outcomes["right"] > 10
