"""Local loops over masks and slices of experts, changed at one node: written rightly or left, and never wrong."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_mutants import FLOAT_CHANGES, INT_CHANGES, mutate, mutate_values
from test_write_grouped_gemms import SlicesByCounts
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.models.testing.project_styles.local_loops import HIDDEN, MixtralLoop, NonzeroLoop, SelectedLoop
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.graph_writer import described_sizes
from moepass.passes.graph.nodes import fake_value, graph_inputs, map_nodes
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.loops.sort_masks import sort_masks
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.runtime.lowering.lower_segments import decompositions

LOOPS: dict[str, type[nn.Module]] = {
    "mixtral": MixtralLoop, "selected": SelectedLoop, "nonzero": NonzeroLoop, "slices": SlicesByCounts,
}  # fmt: skip
WAYS: tuple[int | str, ...] = (*range(4), *FLOAT_CHANGES, *INT_CHANGES, "flag", "constant")


@functools.cache
def _captured(name: str) -> tuple[GraphModule, list[tuple[Any, ...]]]:
    """The graph of a loop, and what it was called with for several numbers of tokens."""
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
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), torch._dynamo.config.patch(switches):
        compiled = torch.compile(LOOPS[name]().eval(), backend=backend, dynamic=True, fullgraph=True)
        for tokens in (11, 4, 23):
            compiled(torch.randn(tokens, HIDDEN))
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


def _is_described(mutant: GraphModule, place: int) -> bool:
    """Whether the changed node gives what the graph says of it: a graph that lies of its sizes is none."""
    node = [node for node in mutant.graph.nodes if node.op == "call_function"][place]
    if not isinstance(fake_value(node), (torch.Tensor, tuple, list)) or node.target is torch.ops.aten.nonzero.default:
        return True
    args, kwargs = map_nodes((node.args, node.kwargs), fake_value)
    try:
        with next(fake_value(one) for one in graph_inputs(mutant.graph) if one.name == "arg0_1").fake_mode:
            return described_sizes(node.target(*args, **kwargs)) == described_sizes(fake_value(node))
    except Exception:
        return False


@torch.no_grad()
def check_mutant(name: str, place: int, how: int | str) -> str:
    module, all_inputs = _captured(name)
    mutant = mutate(module, place, how) if isinstance(how, int) else mutate_values(module, place, how)
    if mutant is None or not _is_described(mutant, place):
        return "no mutant"
    written = run_passes((sort_masks, write_grouped_gemms), mutant, Plan(), PassContext()).module
    for inputs in all_inputs:
        expected = _run(mutant, inputs)
        if expected is None:
            return "meaningless"
        torch.testing.assert_close(written.forward(*inputs)[0], expected, rtol=1e-4, atol=1e-4)
    return "right" if any(map(is_grouped_gemm, written.graph.nodes)) else "left"


def check_loop(name: str, step: int) -> collections.Counter[str]:
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
@pytest.mark.parametrize("name", LOOPS)
def test_every_mutant_is_written_rightly_or_left(name: str) -> None:
    outcomes = check_loop(name, 1)
    assert outcomes["left"] > 20
    assert outcomes["right"] > 20
