"""Partitioning: the same results from fewer distinct pieces, in unchanged order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import moepass
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PlanError
from moepass.passes.ops.traits import mutates
from moepass.passes.pipeline import compile_graph
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.lower_segments import lower_segments
from tests.helpers.graphs.backend_helper import (
    BLOCKS,
    EXPERTS,
    BatchedBlock,
    Captured,
    DenseBlock,
    Stack,
    capture,
    find,
    fingerprint,
    slot_order,
    streamed,
    tokens,
    up_to,
)
from tests.helpers.graphs.error_fields import refused


def _segments(top: GraphModule) -> dict[str, GraphModule]:
    return {name: child for name, child in top.named_children() if isinstance(child, GraphModule)}


def _run(top: GraphModule, plan: Plan, model: nn.Module, captured: Captured) -> tuple[object, ...]:
    """Run the top-level graph on the recorded inputs, with the model's own ring; released slots turn to NaN."""
    store = next((module.store for module in model.modules() if hasattr(module, "store")), None)
    executor = Executor(lower_segments(top, "eager").top, plan, store.ring(debug=True) if store else None)
    with torch.no_grad():
        return tuple(executor(list(captured.inputs)))


def _equal(got: tuple[object, ...], want: tuple[object, ...]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, want, strict=True))


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("form", BLOCKS)
def test_results_are_equal_to_the_bit(form: str, offloaded: bool, dynamic: bool) -> None:
    model = Stack(form, depth=3, bias=True)
    captured = (streamed if offloaded else capture)(model, tokens(), dynamic=dynamic)
    before = fingerprint(captured.module)
    result = up_to("partition", captured.module)
    assert fingerprint(captured.module) == before
    assert _equal(_run(result.module, result.plan, model, captured), captured.run())
    assert dynamic == any(isinstance(value, int) for value in captured.inputs)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_distinct_segments_do_not_grow_with_depth(offloaded: bool, dynamic: bool) -> None:
    distinct, calls = [], []
    for depth in (2, 4, 8):
        torch._dynamo.reset()
        captured = (streamed if offloaded else capture)(Stack("grouped_mm", depth=depth), tokens(), dynamic=dynamic)
        result = up_to("partition", captured.module)
        distinct.append(result.plan.distinct_segments)
        calls.append(sum(step.op == "segment" for step in result.plan.steps))
        assert len(_segments(result.module)) == distinct[-1]
    assert distinct[0] == distinct[1] == distinct[2]
    assert calls[0] < calls[1] < calls[2]


@pytest.mark.slow
def test_layers_that_differ_do_not_share_a_segment() -> None:
    class Scaled(nn.Module):
        def __init__(self, factors: tuple[float, ...]) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(DenseBlock(seed=layer) for layer in range(4))
            self.factors = factors

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block, factor in zip(self.blocks, self.factors, strict=True):
                x = x + block(x * factor, x).tanh() * factor
            return x

    distinct = {}
    for factors in ((2.0,) * 4, (2.0, 2.0, 3.0, 2.0)):
        model = Scaled(factors)
        captured = streamed(model, tokens())
        result = up_to("partition", captured.module)
        distinct[factors] = result.plan.distinct_segments
        assert _equal(_run(result.module, result.plan, model, captured), captured.run())
    assert distinct[2.0, 2.0, 3.0, 2.0] > distinct[(2.0,) * 4]


@pytest.mark.slow
def test_the_plan_lists_slot_operations_in_their_order() -> None:
    captured = streamed(Stack("grouped_mm", depth=4), tokens())
    scheduled, cut = up_to("verify", captured.module), up_to("partition", captured.module)
    assert slot_order(cut.module) == slot_order(scheduled.module)
    steps = [f"{step.op} {step.bank}>{step.slot}" for step in cut.plan.steps if step.op != "segment"]
    assert steps == slot_order(scheduled.module)
    calls = [step for step in cut.plan.steps if step.op == "segment"]
    assert {step.name.split(":")[0] for step in calls} == set(_segments(cut.module))
    for segment in cut.plan.segments:
        mine = [step for step in calls if step.name.split(":")[0] == segment.name]
        assert [f"{segment.name}: {use.layers}" if use.layers else segment.name for use in segment.uses] == [
            step.name for step in mine
        ]
        assert all(step.cost == segment.cost for step in mine)
    # The top level contains only segments, slot operations and their elements.
    assert {node.op for node in cut.module.graph.nodes} <= {"placeholder", "call_module", "call_function", "output"}
    assert not any("aten" in str(node.target) for node in cut.module.graph.nodes)


def test_a_view_of_weights_that_crosses_a_cut_is_read_before_the_release() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = BatchedBlock(seed=0), BatchedBlock(seed=1)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            view = self.a.up.transpose(1, 2)[:, :, :2]
            y = self.b(self.a(x, ids), ids)
            return y + view.sum()

    inputs = tokens(), torch.tensor([[0, 1]] * 6)
    model = Crossing()
    with torch.no_grad():
        expected = model(*inputs)
    captured = streamed(model, *inputs)
    result = up_to("partition", captured.module)
    (got,) = _run(result.module, result.plan, model, captured)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, expected)
    order = slot_order(result.module)
    assert order.index("release 0>0") > order.index("acquire 1>1")


def test_constants_come_along() -> None:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(DenseBlock(seed=layer) for layer in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = x + block(x * torch.tensor([1.5, 2.5 + index]).repeat(x.shape[1] // 2), x).tanh()
            return x

    model = Constants()
    with torch.no_grad():
        expected = model(tokens())
    captured = streamed(model, tokens())
    result = up_to("partition", captured.module)
    assert any(node.op == "get_attr" for node in captured.module.graph.nodes)
    (got,) = _run(result.module, result.plan, model, captured)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, expected)


class Counting(nn.Module):
    """A model that updates buffers in place before and after a block."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = BatchedBlock()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.block(x * self.calls, ids)
        self.mean.copy_(0.5 * self.mean + y.mean(0))
        return y + self.mean


@pytest.mark.sampled(every=4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_updates_of_buffers_survive(offloaded: bool, lower: str) -> None:
    inputs = tokens(), torch.tensor([[0, 1]] * 6)
    plain, model = Counting(), Counting()
    if offloaded:
        moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", options={"lower": lower, "debug": True})
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)
    assert model.calls.item() == plain.calls.item() == 3
    torch.testing.assert_close(model.mean, plain.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offloaded", [False, True])
def test_no_segment_writes_into_its_inputs(offloaded: bool) -> None:
    """Writes to inputs stay between segments, so that an output of Inductor that aliases an input is still right."""
    captured = (streamed if offloaded else capture)(Counting(), tokens(), torch.tensor([[0, 1]] * 6))
    top = up_to("partition", captured.module).module
    assert len(find(top, torch.ops.aten.copy_.default)) == 2
    assert not any(mutates(node) for segment in _segments(top).values() for node in segment.graph.nodes)


@pytest.mark.slow
def test_new_sizes_run_through_a_dynamic_partition() -> None:
    model = Stack("grouped_mm", depth=2)
    captured = capture(model, tokens(), dynamic=True)
    top = up_to("partition", captured.module).module
    for count in (2, 7, 19):
        x = tokens(count)
        fresh = [
            count if isinstance(value, int) else x if value.shape == (6, 32) else value for value in captured.inputs
        ]
        with torch.no_grad():
            assert torch.equal(top(*fresh)[0], model(x))


class Selecting(nn.Module):
    """A model whose blocks have a data-dependent number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = BatchedBlock(seed=0), BatchedBlock(seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = x[x[:, 0] > 0]
        ids = positive[:, :EXPERTS].topk(2, dim=-1).indices
        y = self.a(positive, ids).relu() * positive.shape[0]
        return self.b(y, ids)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_size_that_comes_out_of_a_tensor(lower: str, offloaded: bool) -> None:
    model = Selecting()
    inputs = [tokens(20, seed=seed) for seed in (1, 2)]
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = [model(x) for x in inputs]
        if offloaded:
            moepass.offload_experts(model)
        with moepass.record_compilations() as compilations:
            compiled = torch.compile(model, backend="asyncep", fullgraph=True, options={"lower": lower, "debug": True})
            for x, want in zip(inputs, expected, strict=True):
                torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-4)
    assert len(compilations) == 1
    assert len(compilations[0].plan.blocks) == 2


@pytest.mark.parametrize("disabled", [{"schedule", "verify"}, {"plan", "schedule", "verify", "predict"}])
def test_an_unscheduled_gather_is_an_error(disabled: set[str]) -> None:
    captured = streamed(Stack(depth=1), tokens())
    with refused(PlanError, name="disable", value=sorted(disabled)):
        compile_graph(captured.module, PassContext(disabled=frozenset(disabled)))


def _noop(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone()


def _cast(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float32, copy=True)


def _slice(weight: torch.Tensor) -> torch.Tensor:
    return weight[0:EXPERTS].contiguous().clone()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("lower", "copy"), [("eager", _noop), ("inductor", _noop), ("inductor", _cast), ("inductor", _slice)]
)
def test_a_copy_of_weights_is_no_view_even_for_a_compiler_that_removes_copies(
    lower: str, copy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = DenseBlock(seed=0), DenseBlock(seed=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight = copy(self.a.up)
            return self.b(self.a(x, x), x), weight

    model = Copies()
    weight = model.a.up.detach().clone()
    moepass.offload_experts(model, slots=1)
    compiled = torch.compile(model, backend="asyncep", options={"lower": lower, "debug": True})
    with torch.no_grad():
        assert torch.equal(compiled(tokens())[1], weight)
