"""Models with their experts as interpreted Triton kernels, compared with the uncompiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import moepass
from moepass.passes.blocks import hoist_token_return
from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.ir.segment import EAGER, INDUCTOR, TRITON, Lowering
from moepass.runtime.lowering import lower_segments
from moepass.runtime.lowering.lower_experts import ExpertLoop
from moepass.runtime.lowering.lower_segments import LoweredSegment
from moepass.runtime.lowering.lower_triton_experts import TritonExperts, lower_to_triton
from tests.helpers.models.expert_segments import ExpertInputs, ExpertSizes, expert_inputs, expert_segment
from tests.helpers.models.tiny import EXPERT_KINDS, tiny_inputs, tiny_model

Compile = Callable[[GraphModule], Any]

Lower = Callable[[GraphModule], tuple[LoweredSegment, Lowering]]


def _one_by_one(graph: GraphModule) -> Any:
    return lambda inputs: graph(*inputs)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[TritonExperts]:
    """Run experts as kernels for every lowering. Returns the list of kernels that were created."""
    made: list[TritonExperts] = []

    def lowered_by(lower: Lower) -> Lower:
        def lower_with_kernels(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
            experts = lower_to_triton(segment, _one_by_one)
            if not isinstance(experts, TritonExperts):
                return lower(segment)
            made.append(experts)
            return LoweredSegment.of(experts, segment, boxed=True), Lowering(TRITON)

        return lower_with_kernels

    monkeypatch.setattr(hoist_token_return, "stores_rows_in_any_order", is_grouped_gemm)
    for how, lower in list(lower_segments.LOWERINGS.items()):
        monkeypatch.setitem(lower_segments.LOWERINGS, how, lowered_by(lower))
    return made


def _assert_equal_to_the_model(family: str, lower: str, kernels: list[TritonExperts]) -> None:
    model = tiny_model(family, num_hidden_layers=2)  # each layer takes seconds in the interpreter
    inputs, second_inputs = tiny_inputs(model), tiny_inputs(model, batch=3, seq=7, seed=1)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = [model(**arguments).logits for arguments in (inputs, second_inputs)]
        moepass.offload_experts(model)
        compiled = torch.compile(model, backend="asyncep", options={"lower": lower}, dynamic=True)
        results = [compiled(**arguments).logits for arguments in (inputs, second_inputs)]
    for ours, theirs in zip(results, expected, strict=True):
        # Of the largest result: so far is the uncompiled model from float64, and Inductor without kernels from both.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    ways = {segment.lowering.how for item in compilations for segment in item.plan.segments if segment.lowering}
    assert kernels
    assert all(experts.program.orders != (None,) for experts in kernels)
    assert TRITON in ways


# test_interpreted_kernels varies the row work.
@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERT_KINDS)
def test_families(family: str, kernels: list[TritonExperts]) -> None:
    _assert_equal_to_the_model(family, EAGER, kernels)


@pytest.mark.slow
def test_a_family_with_what_inductor_decomposes(kernels: list[TritonExperts]) -> None:
    _assert_equal_to_the_model("gpt_oss", INDUCTOR, kernels)


@pytest.mark.slow
def test_other_products_are_refused_by_line(no_grad: None) -> None:
    model = tiny_model("llama4")
    refused = []
    with pytest.MonkeyPatch.context() as patch:
        lower = lower_segments.LOWERINGS[EAGER]

        def record(segment: GraphModule) -> tuple[LoweredSegment, Lowering]:
            if (refusal := lower_to_triton(segment, _one_by_one)) is not None:
                refused.append(str(refusal))
            return lower(segment)

        patch.setitem(lower_segments.LOWERINGS, EAGER, record)
        options = {"lower": "eager", "disable": ["compute_chosen_pairs"]}
        torch.compile(model, backend="asyncep", options=options)(**tiny_inputs(model))
    assert refused
    assert "modeling_llama4.py" in refused[0]
    assert "is not a grouped GEMM" in refused[0]


def test_experts_on_a_gpu_become_kernels_and_others_a_loop() -> None:
    inputs = expert_inputs(ExpertSizes(tokens=40, pairs=75, experts=5, hidden=48, width=24))
    on_cpu = lower_segments._by_expert(expert_segment("sigmoid gate", "biases", inputs))
    assert isinstance(on_cpu, ExpertLoop)
    with FakeTensorMode():
        on_gpu = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in inputs.tensors()]
        experts = lower_segments._by_expert(expert_segment("sigmoid gate", "biases", ExpertInputs(*on_gpu)))
    assert isinstance(experts, TritonExperts)
    assert [len(kernel.operands) for kernel in experts.kernels.kernels] == [4, 3]


@pytest.mark.slow
def test_work_before_the_first_gemm_for_any_number_of_tokens() -> None:
    """Inductor compiles it. Its inputs have twice as many rows as there are tokens."""
    product = torch.ops.transformers.grouped_mm_fallback

    def compute(tokens: int, rows: torch.Tensor, up: torch.Tensor, other: torch.Tensor, ends: torch.Tensor) -> Any:
        return (product(rows, up, ends) + product(rows.tanh() * 0.5, other, ends),)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    tokens = mode.from_tensor(torch.empty(5), symbolic_context=context).shape[0]
    with mode:
        fakes = (torch.empty(2 * tokens, 8), torch.empty(3, 8, 4), torch.empty(3, 8, 4))
        segment = make_fx(compute)(tokens, *fakes, torch.empty(3, dtype=torch.int32))
    lowered = lower_to_triton(segment, lambda graph: lower_segments.compile_with_inductor(graph, mode))
    assert isinstance(lowered, TritonExperts)
    assert lowered.kernels.before is not None
    for number in (5, 1, 8):
        tensors = (torch.randn(2 * number, 8), torch.randn(3, 8, 4), torch.randn(3, 8, 4))
        ends = torch.tensor([2, 2, 2 * number], dtype=torch.int32)
        (result,) = lowered([number, *tensors, ends])
        torch.testing.assert_close(result, compute(number, *tensors, ends)[0])
