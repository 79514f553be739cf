"""Capture a model, run passes over its graph, and compare what the graph gives with what the model gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Pass, PassContext, PassResult, run_passes
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.readable_refusals import check_readable


def captured(
    model: nn.Module,
    passes: Sequence[Pass],
    inputs: Sequence[Sequence[Any]],
    *,
    tolerance: float,
    dynamic: bool = True,
    compare: bool = True,
) -> PassResult:
    """The graph of `model` behind `passes`, run with each of `inputs`, of any length where `dynamic`."""
    results: list[PassResult] = []

    def compile_graph(module: GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        results.append(run_passes(passes, module, Plan(), PassContext()))
        return make_boxed_func(results[-1].module.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph, inference_compiler=compile_graph, decompositions=decompositions("eager")
    )
    torch._dynamo.reset()
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), torch._dynamo.config.patch(switches):
        compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        for given in inputs:
            for value in given if dynamic else ():
                torch._dynamo.mark_dynamic(value, 0)
            found = compiled(*given)
            if compare:
                expected = model(*given)
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    check_readable(results[0].refusals)
    return results[0]
