"""Parameters of single experts lie in one allocation after the first run, and runs always read their present values."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import moepass
from moepass.passes.blocks.lower_expert_stacks import lower_expert_stacks
from moepass.passes.graph.nodes import fake_value, graph_inputs, is_call
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, run_passes
from moepass.passes.ir.slot_operations import EXPERT_STACK
from moepass.passes.loops.write_grouped_gemms import write_grouped_gemms
from moepass.passes.masks.sort_masks import sort_masks
from moepass.runtime.banks.stacked_parameters import StackedParameters
from tests.helpers.graphs.fake_gpu import captured_graph, on_gpu, pretended_gpu, put_on_gpu
from tests.helpers.project_styles.local_loops import HIDDEN, MixtralLoop

EXPERTS = 4


def experts() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, 3) for _ in range(EXPERTS))


def weights(model: nn.ModuleList) -> list[torch.Tensor]:
    return [expert.weight for expert in model]


def stacked() -> StackedParameters:
    return StackedParameters([f"{number}.weight" for number in range(EXPERTS)])


def memories(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def check(of: StackedParameters, parts: list[torch.Tensor]) -> torch.Tensor:
    together = of(parts)
    assert torch.equal(together, torch.stack([parameter.detach() for parameter in parts]))
    assert together.is_contiguous()
    return together


def test_parameters_move_once_and_stay_what_they_were() -> None:
    model, of = experts(), stacked()
    parts = weights(model)
    before = [
        (id(parameter), parameter._version, parameter.stride(), parameter.requires_grad, parameter.detach().clone())
        for parameter in parts
    ]
    together = check(of, parts)
    assert len(memories(parts)) == 1
    assert parts[0].untyped_storage().nbytes() == sum(
        parameter.nbytes for parameter in parts
    )  # no bytes are in memory twice
    for parameter, (key, version, stride, needs_gradients, value) in zip(parts, before, strict=True):
        assert (id(parameter), parameter._version, parameter.stride(), parameter.requires_grad) == (
            key,
            version,
            stride,
            needs_gradients,
        )
        assert torch.equal(parameter, value)
    assert of(parts).data_ptr() == together.data_ptr() == parts[0].data_ptr()
    # Another graph reads the same memory, and a graph of fewer experts reads a slice of it.
    assert stacked()(parts).data_ptr() == together.data_ptr()
    assert stacked()(parts[1:3]).data_ptr() == parts[1].data_ptr()


def copied(model: nn.ModuleList) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def assigned(model: nn.ModuleList) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def one_assigned(model: nn.ModuleList) -> None:
    model[2].weight = nn.Parameter(torch.randn(3, 6))


def written(model: nn.ModuleList) -> None:
    with torch.no_grad():
        model[1].weight.mul_(2)


def written_past_torch(model: nn.ModuleList) -> None:
    model[1].weight.data[0, 0] = 7


def other_memory(model: nn.ModuleList) -> None:
    model[3].weight.data = torch.randn(3, 6)


def exchanged(model: nn.ModuleList) -> None:
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


@pytest.mark.parametrize(
    "change", [copied, assigned, one_assigned, written, written_past_torch, other_memory, exchanged]
)
def test_a_run_reads_the_present_values_of_the_parameters(change: Callable[[nn.ModuleList], None]) -> None:
    model, of = experts(), stacked()
    check(of, weights(model))
    change(model)
    check(of, weights(model))
    assert len(memories(weights(model))) == 1  # the new parameters moved too
    check(of, weights(model))


def test_no_memory_stays_behind() -> None:
    model, of = experts(), stacked()
    check(of, weights(model))
    assigned(model)
    first = check(of, weights(model)).untyped_storage()
    held = torch._C._storage_Use_Count(first._cdata)
    del model
    assert torch._C._storage_Use_Count(first._cdata) == held - EXPERTS


def tied(model: nn.ModuleList) -> object:
    """Return a second parameter in the memory of the first."""
    return nn.Parameter(model[1].weight.data)


def one_buffer(model: nn.ModuleList) -> object:
    buffer = torch.randn(EXPERTS + 1, 3, 6)
    for number, expert in enumerate(model):
        expert.weight.data = buffer[EXPERTS - number]
    return buffer


def seen_by_numpy(model: nn.ModuleList) -> object:
    return model[1].weight.detach().numpy()


def seen_by_processes(model: nn.ModuleList) -> object:
    """Put a parameter into memory that forked processes share."""
    return model.share_memory()


def other_loop(model: nn.ModuleList) -> object:
    """Let another loop move two of the parameters together, in another order."""
    stack = stacked()
    stack([model[2].weight, model[0].weight])
    return stack


@pytest.mark.parametrize("share", [tied, one_buffer, seen_by_numpy, seen_by_processes, other_loop])
def test_memory_with_other_users_is_copied_with_a_warning(
    share: Callable[[nn.ModuleList], object], caplog: pytest.LogCaptureFixture
) -> None:
    model, of = experts(), stacked()
    second_user = share(model)
    before = [parameter.data_ptr() for parameter in weights(model)]
    with caplog.at_level(logging.WARNING, "moepass"):
        check(of, weights(model))
        check(of, weights(model))
    assert [parameter.data_ptr() for parameter in weights(model)] == before
    (record,) = caplog.records  # once
    assert "0.weight and 3 others are copied together in each run" in record.getMessage()
    with torch.no_grad():
        model[1].weight.fill_(3)
    check(of, weights(model))
    del second_user


@pytest.mark.parametrize("change", [assigned, one_assigned, other_memory])
def test_two_graphs_that_read_the_same_move_new_parameters_once(change: Callable[[nn.ModuleList], None]) -> None:
    model, graphs = experts(), [stacked(), stacked()]
    for _ in range(2):
        for of in (*graphs, *reversed(graphs)):
            check(of, weights(model))
            assert len(memories(weights(model))) == 1
        change(model)


def test_a_freed_graph_keeps_no_parameters_together() -> None:
    model = experts()
    other_loop(model)
    check(stacked(), weights(model))
    assert len(memories(weights(model))) == 1


def test_a_buffer_of_their_own_is_no_reason_to_copy() -> None:
    model = experts()
    buffer = torch.randn(EXPERTS, 3, 6)
    for number, expert in enumerate(model):
        expert.weight.data = buffer[EXPERTS - 1 - number]
    del buffer
    check(stacked(), weights(model))
    assert len(memories(weights(model))) == 1


def test_neighbours_in_memory_by_chance_are_not_one_tensor() -> None:
    buffer = bytearray(4 * 24)
    halves = [torch.frombuffer(buffer, dtype=torch.float32, offset=48 * number, count=12) for number in range(2)]
    of = StackedParameters(["a", "b"])
    assert of(halves).data_ptr() != halves[0].data_ptr()
    halves[1].fill_(1)
    check(of, halves)


def test_parameters_of_inference_mode_stay_that() -> None:
    with torch.inference_mode():
        model = experts()
        parts = weights(model)
        check(stacked(), parts)
    assert len(memories(parts)) == 1
    assert all(parameter.is_inference() for parameter in parts)
    later, of = experts(), stacked()
    with torch.inference_mode():
        check(of, weights(later))
    assert not any(parameter.is_inference() for parameter in weights(later))
    with torch.no_grad():
        later[0].weight.add_(1)
    check(of, weights(later))


def test_models_are_copied_and_stored_as_before() -> None:
    model, of = experts(), stacked()
    check(of, weights(model))
    twin = copy.deepcopy(model)
    check(of, weights(twin))
    assert memories(weights(twin)).isdisjoint(memories(weights(model)))
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@torch.no_grad()
def test_a_plan_says_which_parameters_are_copied_in_each_run() -> None:
    torch.manual_seed(0)
    model = MixtralLoop().eval()
    model.other = model.experts[1].w1.weight.detach()[0]  # a view of one expert's memory
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(switches), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", dynamic=True, options={"lower": "eager"})
        for number in (5, 7):
            rows = torch.randn(number, HIDDEN)
            torch.testing.assert_close(compiled(rows), model(rows), rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    (refusal,) = compilation.plan.refusals
    assert "copied together in each run" in refusal.reason
    assert "w1.weight" in refusal.reason
    assert compilation.executor.plan.refusals == ()


@pytest.mark.slow
def test_stacks_of_parameters_are_described_on_a_gpu() -> None:
    switches = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with pretended_gpu(), torch._dynamo.config.patch(switches):
        model = MixtralLoop().eval()
        put_on_gpu(model)
        module = captured_graph(model, on_gpu(torch.empty(11, HIDDEN)))
        for node in graph_inputs(module.graph):
            node.meta[ARGUMENT_KEY] = fake_value(node).shape == (11, HIDDEN)
        passes = (sort_masks, write_grouped_gemms, lower_expert_stacks)
        graph = run_passes(passes, module, Plan(), PassContext()).module.graph
        stacks = [node for node in graph.nodes if is_call(node, EXPERT_STACK)]
        for node in stacks:
            described = EXPERT_STACK([fake_value(operand) for operand in node.args[0]])
            assert described.shape == fake_value(node).shape
            assert described.device.type == fake_value(node).device.type == "cuda"
    assert len(stacks) == 3
