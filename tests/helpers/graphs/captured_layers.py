"""Capture a layer of dense experts, run passes over its graph, and compare what both give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.dense.compute_chosen_pairs import compute_chosen_pairs
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Pass, PassContext, PassResult, run_passes
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.project_styles.dense_experts import HIDDEN


def tokens(number: int, dtype: torch.dtype = torch.float32, width: int = HIDDEN) -> torch.Tensor:
    return torch.randn(number, width, generator=torch.Generator().manual_seed(number)).to(dtype)


def compiled(
    model: nn.Module,
    *,
    passes: Sequence[Pass] = (compute_chosen_pairs,),
    lower: str = "eager",
    dtype: torch.dtype = torch.float32,
    numbers: Sequence[int] = (11, 29, 3),
    dynamic: bool = True,
    tolerance: float = 1e-5,
) -> PassResult:
    """The graph of `model` behind `passes`, compared with `model` for several numbers of tokens."""
    results: list[PassResult] = []

    def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        results.append(run_passes(passes, module, Plan(), PassContext()))
        return make_boxed_func(results[-1].module.forward)

    backend = aot_autograd(
        fw_compiler=compile_graph, inference_compiler=compile_graph, decompositions=decompositions(lower)
    )
    torch._dynamo.reset()
    model = model.eval().to(dtype)
    with torch.no_grad():
        run = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
        for number in numbers:
            given = tokens(number, dtype)
            torch.testing.assert_close(run(given), model(given), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert len(results) == (1 if dynamic else len(numbers))
    check_readable(results[0].refusals)
    return results[0]


def forms(result: PassResult) -> list[str]:
    """How the experts of a graph are written, block by block."""
    return [match.record.form for match in find_blocks(result.module.graph).matches]
