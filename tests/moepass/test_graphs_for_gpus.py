"""Graphs for a GPU get the same plans as graphs for a CPU. They are captured but cannot be run here."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import sympy
import torch
from torch.fx import Graph, GraphModule

from moepass.backend import _ring_device
from moepass.models.errors import InputError, OptionError
from moepass.models.homes import COLLECTIVE
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import fake_value
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Group, PassContext, PassResult
from moepass.passes.ir.slot_operations import acquire, prefetch, release
from moepass.passes.pipeline import compile_graph
from moepass.passes.segments.cuda_graphs import with_cuda_graphs
from moepass.runtime.execute.adoption import adoption
from moepass.runtime.homes.adopted_banks import AdoptionOptions
from moepass.runtime.transfer.link import Link
from tests.helpers.graphs.fake_gpu import captured_graph, on_gpu, pretended_gpu, put_on_gpu
from tests.helpers.graphs.simulated_ranks import pretend_rank
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.models.tiny import TINY_FAMILIES, tiny_inputs, tiny_model

# Grouped GEMMs want bf16 on a GPU.
CONFIG = StackConfig(layers=2, dtype=torch.bfloat16)
DEVICE = torch.device("cuda", 0)
# Recurrent layers are unrolled, which takes minutes and has nothing to do with the GPU.
FAMILIES = sorted({*TINY_FAMILIES} - {"jamba", "qwen3_next"})


def _graphs(module: GraphModule) -> list[Graph]:
    """Yield the graph of `module` and those of its segments."""
    return [child.graph for child in module.modules() if isinstance(child, GraphModule)]


def _devices(graphs: list[Graph]) -> set[torch.device]:
    values = [fake_value(node) for graph in graphs for node in graph.nodes]
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def _with_parallel_experts(form: str, lower: str) -> tuple[GraphModule, PassResult]:
    """Return the graph of one of two ranks, and its compiled form."""
    with pretend_rank(1, 2) as group:
        model = build_stack(CONFIG, form)
        with pretended_gpu():
            put_on_gpu(model)
            captured = captured_graph(model, on_gpu(torch.empty(12, CONFIG.hidden, dtype=CONFIG.dtype)), lower=lower)
    context = PassContext(slots=2, groups={group: Group(1, 2)})
    return captured, compile_graph(captured, context)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("form", EP_FORMS)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_expert_parallelism_leaves_the_graph(form: str, lower: str) -> None:
    captured, result = _with_parallel_experts(form, lower)
    assert len(list(communications_of(captured.graph))) >= CONFIG.layers
    assert result.plan.refusals == ()
    assert [block.parallel for block in result.plan.blocks] == [form] * CONFIG.layers
    targets = [node.target for node in result.module.graph.nodes]
    for operation in (prefetch, acquire, release):
        assert targets.count(operation) == CONFIG.layers
    graphs = _graphs(result.module)
    assert not any(True for graph in graphs for _ in communications_of(graph))
    assert _devices(graphs) == {DEVICE}


@pytest.mark.slow
def test_what_does_not_come_to_a_gpu_yet_is_an_error() -> None:
    _, result = _with_parallel_experts("all_to_all", "eager")
    assert adoption(result.plan, DEVICE, AdoptionOptions()) is not None
    with (
        mock.patch.object(torch.distributed, "is_nccl_available", return_value=False),
        pytest.raises(InputError, match=r"transport='collective' on cuda:0 needs NCCL, .* transport='pull'"),
    ):
        adoption(result.plan, DEVICE, AdoptionOptions(transport=COLLECTIVE))
    with pytest.raises(OptionError, match="works on device cpu only; the device is cuda:0"):
        adoption(result.plan, DEVICE, AdoptionOptions(link=Link(1e9)))


@pytest.mark.parametrize("device", [None, DEVICE])
def test_the_ring_lies_where_the_graph_computes(device: torch.device | None) -> None:
    class Layer(torch.nn.Module):
        def forward(self, first: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return first.sum() + hidden

    with pretended_gpu():
        on_cpu = torch.empty(3)
        captured = captured_graph(Layer(), on_cpu, on_cpu if device is None else on_gpu(on_cpu))
    assert _ring_device(captured) == (device or torch.device("cpu"))


def _essence(plan: Plan) -> object:
    """Return the plan without names of nodes and bytes: attention and counting have other operators on a GPU.

    On a GPU, routing weights are multiplied in the segments of experts, which may end in another module of the model,
    so the FLOPs of all steps are added up.
    """
    blocks = [dataclasses.replace(block, gemms=()) for block in plan.blocks]
    steps = [(step.op, (step.name or "").split(" to ")[0], step.bank, step.slot) for step in plan.steps]
    flops = sum(sympy.sympify(step.cost.flops) for step in plan.steps if step.cost)
    return plan.strategy, plan.refusals, plan.slot_stays, blocks, steps, flops


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_become_the_plans_of_a_cpu_and_cuda_graphs(family: str, capability: tuple[int, int]) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    inputs = tiny_inputs(model)
    expected = compile_graph(captured_graph(model, **inputs), PassContext()).plan
    torch._dynamo.reset()
    with pretended_gpu(capability):
        put_on_gpu(model)
        captured = captured_graph(model, **{name: on_gpu(value) for name, value in inputs.items()})
    result = compile_graph(captured, PassContext())
    assert len(result.plan.blocks) > 0
    assert _essence(result.plan) == _essence(expected)
    uses = [segment.cuda_graph for segment in with_cuda_graphs(result.plan.segments, result.module)]
    refusals = [str(use.refusal) for use in uses if use and use.refusal]
    if family == "phimoe":
        # It computes its rotary frequencies on the host in every run, and copies them.
        (refusal,) = refusals
        assert "compute_default_rope_parameters" in refusal
        assert "makes a tensor on cpu" in refusal
    else:
        assert refusals == []
