"""Run passes over the graph of a model, and compare the outputs of the graph with those of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Pass, PassContext, PassResult, run_passes
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.readable_refusals import check_readable


def compare_with_model(
    model: Callable[..., Any],
    passes: Sequence[Pass],
    inputs: Sequence[Sequence[Any]],
    *,
    rtol: float,
    atol: float | None = None,
    lower: str = "eager",
    dynamic: bool = True,
    compare: bool = True,
    allow_nan: bool = False,
) -> PassResult:
    """Return the result of `passes` for the graph of `model`, and check the graph's outputs for each of `inputs`.

    Args:
        model: A module or a function. It is captured as one graph, with the first of `inputs`.
        passes: The passes to run over the captured graph.
        inputs: The arguments of each call.
        rtol: The relative tolerance of the comparison.
        atol: The absolute tolerance; None for that of `rtol`.
        lower: The value of the option `lower`, which selects the decompositions.
        dynamic: Whether all sizes are symbolic. If False, sizes are fixed, except those marked by the caller.
        compare: Whether outputs are compared. If False, the graph is run, and its outputs are ignored.
        allow_nan: Whether NaN in both outputs counts as equal.

    Raises:
        AssertionError: If an output differs, a refusal is not readable, or more than one graph was captured.
    """
    results: list[PassResult] = []

    def compile_graph(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        results.append(run_passes(passes, module, Plan(), PassContext()))
        return make_boxed_func(results[-1].module.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph, inference_compiler=compile_graph, decompositions=decompositions(lower)
    )
    torch._dynamo.reset()
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), torch._dynamo.config.patch(switches):
        compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
        for arguments in inputs:
            outputs = compiled(*arguments)
            if compare:
                torch.testing.assert_close(
                    outputs, model(*arguments), rtol=rtol, atol=rtol if atol is None else atol, equal_nan=allow_nan
                )
    (result,) = results
    check_readable(result.refusals)
    return result


def compare_with_dynamic_rows(
    model: Callable[..., Any],
    passes: Sequence[Pass],
    inputs: Sequence[Sequence[torch.Tensor]],
    *,
    tolerance: float,
    compare: bool = True,
) -> PassResult:
    """Return what `compare_with_model` returns for a graph in which only the first size of each input is symbolic."""
    for value in (tensor for arguments in inputs for tensor in arguments):
        torch._dynamo.mark_dynamic(value, 0)
    return compare_with_model(model, passes, inputs, rtol=tolerance, dynamic=False, compare=compare, allow_nan=True)
