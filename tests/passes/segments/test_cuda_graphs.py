"""The segments that can be CUDA graphs, determined on graphs captured for a GPU without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from moepass.passes.segments.cuda_graphs import with_cuda_graphs
from moepass.passes.segments.partition import cut_into_segments
from tests.helpers.graphs.backend_helper import HIDDEN
from tests.helpers.graphs.fake_gpu import captured_graph, on_gpu, pretended_gpu, put_on_gpu
from tests.helpers.graphs.simulated_ranks import pretend_rank
from tests.helpers.models.moe_stack import StackConfig, build_stack


def _refusals(captured: GraphModule) -> list[str]:
    """Return the reasons why segments of a captured graph cannot be CUDA graphs, without changing the graph."""
    cut = cut_into_segments(captured)
    graph_reasons = [segment.cuda_graph for segment in with_cuda_graphs(cut.segments, cut.top)]
    return [str(use.refusal) for use in graph_reasons if use is not None and use.refusal is not None]


def _refusal(function: Any, *inputs: torch.Tensor) -> str:
    class Module(nn.Module):
        def forward(self, *values: torch.Tensor) -> Any:
            return function(*values)

    with pretended_gpu():
        captured = captured_graph(Module(), *inputs if inputs else (on_gpu(torch.empty(4, HIDDEN)),))
    (refusal,) = _refusals(captured)
    return refusal


@pytest.mark.parametrize(
    "function", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.new_ones(x[0, 0].long().item()) + 1]
)
def test_values_that_the_host_reads_are_refused(function: Any) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert "a size in it depends on values of tensors" in _refusal(function)


def test_a_write_through_a_mask_is_refused() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[y > 0] = x.new_zeros(())
        return y

    refusal = _refusal(write)
    assert "aten.index_put.default with a mask makes the host wait" in refusal
    assert "test_cuda_graphs.py" in refusal  # the line that it comes from


def test_tensors_on_a_cpu_are_refused() -> None:
    with pretended_gpu():
        values = on_gpu(torch.empty(4, HIDDEN)), torch.empty(())
        assert "it reads a tensor on cpu" in _refusal(lambda x, scale: x * scale, *values)


def test_operators_of_other_libraries_are_refused() -> None:
    """In fp32, transformers' grouped GEMMs loop over experts on the host."""
    ends = torch.empty(2, dtype=torch.int32)
    with pretended_gpu():
        values = [on_gpu(value) for value in (torch.empty(4, HIDDEN), torch.empty(2, HIDDEN, HIDDEN), ends)]
        refusal = _refusal(torch.ops.transformers.grouped_mm_fallback, *values)
    assert "operator transformers.grouped_mm_fallback.default is not part of torch" in refusal


def test_communication_is_refused() -> None:
    config = StackConfig(layers=1, dtype=torch.bfloat16)
    with pretend_rank(1, 2):
        model = build_stack(config, "all_reduce")
        with pretended_gpu():
            put_on_gpu(model)
            captured = captured_graph(model, on_gpu(torch.empty(12, config.hidden, dtype=config.dtype)))
    assert any("it communicates" in text for text in _refusals(captured))
