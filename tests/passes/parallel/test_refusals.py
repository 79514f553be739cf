"""Every communication near experts that is not eliminated gets a refusal with its location and advice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import GraphModule
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows, gather_rows, sum_over_ranks
from moepass.models.reference.expert_parallel import EP_FORMS, AllGatherExperts, AllReduceExperts, AllToAllExperts
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, sort_by_expert, weighted_sum
from moepass.passes.graph.collectives import communications_of, group_names
from moepass.passes.graph.nodes import copy_graph_module, graph_inputs
from moepass.passes.graph.refusals import refusal_of
from moepass.passes.graph.source_lines import describe_node, input_name, name_of_source, place_of, source_line
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import Group, PassContext
from moepass.passes.parallel.eliminate_expert_parallelism import eliminate_expert_parallelism
from moepass.passes.pipeline import compile_graph
from moepass.runtime.execute.captured import capture_notes, name_inputs
from moepass.runtime.lowering.lower_segments import decompositions
from tests.helpers.graphs.readable_refusals import check_readable
from tests.helpers.graphs.simulated_ranks import Captured, capture, hidden_states, pretend_rank
from tests.helpers.models.moe_stack import StackConfig, build_stack

SCALARS, MASKS = "capture_scalar_outputs", "capture_dynamic_output_shape_ops"
CONFIG = StackConfig(layers=1, hidden=16, width=16)


def plans_of(
    model: Callable[..., Any], *inputs: torch.Tensor, ranks: int = 2, switches: Sequence[str] = ()
) -> list[Plan]:
    """Return the plans of all graphs of `model` on rank 0, with only these switches of Dynamo turned on."""
    plans: list[Plan] = []

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        notes = capture_notes(graph)

        def plan(captured: GraphModule, fake_inputs: Sequence[Any]) -> Any:
            name_inputs(captured, graph)
            groups = dict.fromkeys(group_names(captured.graph), Group(0, ranks))
            plans.append(compile_graph(captured, PassContext(groups=groups, capture=notes)).plan)

            def run(values: list[Any]) -> Any:
                return captured(*values)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return aot_autograd(fw_compiler=plan, inference_compiler=plan, decompositions=decompositions("eager"))(
            graph, example_inputs
        )

    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch({name: name in switches for name in (SCALARS, MASKS)}):
        torch.compile(model, backend=backend)(*inputs)
    return plans


def _plan(captured: Captured) -> Plan:
    return compile_graph(captured.module, PassContext(groups=captured.groups)).plan


class NoWayBack(AllToAllExperts):
    """A part of a model whose rows arrive and whose results are used by another graph."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        ranks, owned, shards = self.placement.ranks, len(self.placement.owned), self.placement.shard_sizes
        sorted_ids, order = sort_by_expert(top_k_index)
        leaving = count_per_expert(sorted_ids, self.placement.experts)
        arriving = exchange_rows(leaving, send=shards, receive=[owned] * ranks, group_name=self.group_name)
        send, receive = self._sizes(leaving, arriving.view(ranks, owned))
        rows = exchange_rows(hidden_states[order // top_k_index.shape[1]], send, receive, self.group_name)
        return hidden_states * self._run_arrived(rows, arriving).sum()


class GatheredOnly(AllGatherExperts):
    """Every rank gathers all tokens, runs its experts on them, and keeps the results."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        ranks = self.placement.ranks
        states, ids = (gather_rows(value, ranks, self.group_name) for value in (hidden_states, top_k_index))
        rows, _ = self.run_some(states, self.to_local(ids))
        return hidden_states * rows.mm(rows.new_ones(rows.shape[1], 1)).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "experts"), [("all_to_all", NoWayBack), ("all_gather", GatheredOnly)])
def test_rows_that_come_and_go_nowhere_are_refused(form: str, experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, form, experts)
    plan = _plan(capture(CONFIG, form, 0, 2, 12))
    (refusal,) = plan.refusals
    check_readable(plan.refusals)
    assert refusal.where == "moe.0.experts"
    assert refusal.group
    assert refusal.crosses_ranks
    assert "nothing in this graph takes its results back" in refusal.reason
    assert plan.strategy == "resident"
    assert re.match(
        r"\d collectives stay in the graph \(.*\), because of moe.0.experts: its rows or counts", plan.reason
    )


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(
    ("form", "rank"), [("all_gather", 0), ("all_reduce", 0), ("all_to_all", 0), ("all_gather", 1), ("all_reduce", 2)]
)
def test_a_rank_without_experts_refuses_the_same_blocks(form: str, rank: int) -> None:
    """Rank 0 of three has none of the two experts, so its graph has exchanges and no GEMM."""
    plan = _plan(capture(dataclasses.replace(CONFIG, experts=2, top_k=1), form, rank, 3, 12))
    (refusal,) = plan.refusals
    check_readable(plan.refusals)
    assert refusal.where == "moe.0.experts"
    assert refusal.crosses_ranks
    assert "because of moe.0.experts: " in plan.reason
    if rank == 0 and form != "all_to_all":
        assert "this rank adds nothing but zeros to the sum over ranks" in refusal.reason
        assert "collectives.py" in refusal.source_line


def test_a_sum_of_partial_results_gets_no_refusal() -> None:
    """Tensor parallelism has such sums. Only sums of values that are zero for every input get a refusal."""

    def model(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(16, 8).index_add(0, torch.arange(4), rows @ weight)
        summed: torch.Tensor = sum_over_ranks(padded, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        return summed

    with pretend_rank(0, 2):
        (plan,) = plans_of(model, torch.zeros(4, 8), torch.zeros(8, 8))
    assert not plan.refusals


class ConvertedGemms(nn.Module):
    def forward(self, rows: torch.Tensor, counts: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        up, down = ((each * rows.abs().amax()).bfloat16().transpose(1, 2) for each in weights)
        gate, up_rows = grouped_gemm(rows.bfloat16(), up, ends).chunk(2, dim=-1)
        return grouped_gemm(F.silu(gate) * up_rows, down, ends).to(rows.dtype)


class Converted(AllToAllExperts):
    """A layer whose weights are scaled by the rows, in a separate module without exchanges."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.inner = ConvertedGemms()

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(rows, counts, self.gate_up_proj, self.down_proj)
        return result


@pytest.mark.slow
def test_exchanges_of_a_refused_gemm_get_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatch, the combine and the exchange of counts get no refusal of their own for missing experts."""
    monkeypatch.setitem(EP_FORMS, "all_to_all", Converted)
    plan = _plan(capture(CONFIG, "all_to_all", 0, 2, 12))
    check_readable(plan.refusals)
    (crossing,) = [refusal for refusal in plan.refusals if refusal.crosses_ranks]
    assert "the weights are computed in the graph" in crossing.reason
    assert not any("no expert GEMM" in refusal.reason for refusal in plan.refusals)


def _with_other_way_back(target: Any, arguments: Callable[..., tuple[Any, ...]]) -> Captured:
    """Return an AllToAll block whose combine uses another operator than its dispatch."""
    captured = capture(CONFIG, "all_to_all", 0, 2, 12)
    changed = copy_graph_module(captured.module)
    combine = [communication.node for communication in communications_of(changed.graph)][-1]
    combine.target, combine.args = target, arguments(*combine.args)
    changed.recompile()
    return Captured(changed, captured.inputs, captured.groups)


def _foreign_operators() -> dict[str, tuple[Any, Callable[..., tuple[Any, ...]]]]:
    library = torch.library.Library("test_engine", "FRAGMENT")
    library.define("fused_combine(Tensor rows, str layer) -> Tensor")
    library.define("send_back(Tensor rows, str group_name) -> Tensor")
    _foreign_operators.library = library  # type: ignore[attr-defined]  # it lives as long as its operators
    functional = torch.ops._c10d_functional
    return {
        "broadcast": (functional.broadcast.default, lambda rows, receive, send, group: (rows, 0, group)),
        "all_gather": (
            functional.all_gather_into_tensor_coalesced.default,
            lambda rows, receive, send, group: ([rows], 2, group),
        ),
        "all_to_all": (torch.ops._c10d_functional_autograd.all_to_all_single.default, lambda *arguments: arguments),
        "all_to_all of dtensor": (
            torch.ops._dtensor.shard_dim_alltoall.default,
            lambda rows, receive, send, group: (rows, 0, 1, group),
        ),
        "combine": (torch.ops.test_engine.fused_combine.default, lambda rows, *_: (rows, "layer 0")),
        "send_back": (torch.ops.test_engine.send_back.default, lambda rows, receive, send, group: (rows, group)),
    }


FOREIGN = _foreign_operators()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOREIGN)
def test_results_that_go_into_an_unknown_collective_are_refused(kind: str) -> None:
    captured = _with_other_way_back(*FOREIGN[kind])
    foreign = [
        communication
        for communication in communications_of(captured.module.graph)
        if communication.node.target is FOREIGN[kind][0]
    ]
    assert [communication.kind for communication in foreign] == [kind.split()[0]]
    context = PassContext(groups=captured.groups)
    (refusal,) = eliminate_expert_parallelism(captured.module, Plan(), context).refusals
    check_readable([refusal])
    assert f"its results go into {kind.split()[0]} `{FOREIGN[kind][0]}`" in refusal.reason
    assert "exchange_rows(rows, send=receive" in refusal.source_line or "_c10d.all_to_all_single" in refusal.source_line
    # If the operator names no group, that of the preceding exchange is used.
    assert refusal.group in captured.groups


@torch.library.custom_op("test_engine::moe_forward", mutates_args=())
def _moe_forward(hidden: torch.Tensor, layer: str) -> torch.Tensor:
    return hidden.clone()


@_moe_forward.register_fake
def _(hidden: torch.Tensor, layer: str) -> torch.Tensor:
    return torch.empty_like(hidden)


class OneOperator(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + _moe_forward(hidden, "layers.0")


def test_experts_in_one_operator_are_refused() -> None:
    (plan,) = plans_of(OneOperator(), torch.randn(4, 8))
    (refusal,) = plan.refusals
    check_readable([refusal])
    assert "test_engine.moe_forward.default` holds experts" in refusal.reason
    assert "return hidden + _moe_forward(hidden" in refusal.source_line
    assert "every expert bank" not in plan.reason


class BrokenAllToAll(AllToAllExperts):
    """A layer like transformers' own: Python reads a value between dispatch and combine, where the graph breaks."""

    def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super()._run_arrived(rows, arriving)


@pytest.mark.slow
def test_the_halves_that_a_graph_break_leaves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", BrokenAllToAll)
    with pretend_rank(0, 2):
        plans = plans_of(build_stack(CONFIG, "all_to_all"), hidden_states(CONFIG, 12, 0), switches=[SCALARS])
    # The results of the fake group are no valid numbers of rows, so at most the first half is compiled.
    exchanging = [plan for plan in plans if plan.refusals]
    assert exchanging
    for plan in exchanging:
        check_readable(plan.refusals)
        assert all(refusal.group and refusal.crosses_ranks for refusal in plan.refusals)
        assert "stay in the graph (" in plan.reason or "stays in the graph (" in plan.reason
        assert all(
            "fullgraph=True" in refusal.reason or "Dynamo broke it" in refusal.reason for refusal in plan.refusals
        )
    assert any(
        re.search(r"broke it at test_refusals.py:\d+, in _run_arrived", plan.refusals[0].reason) for plan in exchanging
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_gather"])
def test_the_switch_that_broke_the_graph_is_named(form: str) -> None:
    with pretend_rank(0, 2):
        plans = plans_of(build_stack(CONFIG, form), hidden_states(CONFIG, 12, 0))
    reasons = [refusal.reason for plan in plans for refusal in plan.refusals]
    check_readable([refusal for plan in plans for refusal in plan.refusals])
    assert any("torch._dynamo.config.capture_scalar_outputs" in reason for reason in reasons)
    assert any(re.search(r"Dynamo broke it at expert_parallel.py:\d+, in \w+: ", reason) for reason in reasons)


class MaskedRows(AllToAllExperts):
    """A layer for tokens that are chosen by a mask, so their number depends on data."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        counts = count_per_expert(top_k_index.reshape(-1), self.placement.experts)
        arriving = exchange_rows(counts, self.placement.shard_sizes, self.placement.shard_sizes, self.group_name)
        chosen = hidden_states[top_k_index[:, 0] < 4]
        return hidden_states * chosen.sum() * arriving.sum()


def test_the_switch_for_masks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_to_all", MaskedRows)
    with pretend_rank(0, 2):
        plans = plans_of(build_stack(CONFIG, "all_to_all"), hidden_states(CONFIG, 12, 0), switches=[SCALARS])
    reasons = [refusal.reason for plan in plans for refusal in plan.refusals]
    assert any("torch._dynamo.config.capture_dynamic_output_shape_ops" in reason for reason in reasons)


# -------------------------------------------------------------------------------- collectives that get no refusal


class TensorParallel(nn.Module):
    """A layer with all experts on every rank, and all-reduces of attention, the dense part and the outputs."""

    def __init__(self, form: str, group_name: str) -> None:
        super().__init__()
        stack = build_stack(StackConfig(layers=2, hidden=16, width=16))
        self.dense, self.moe, self.form, self.group_name = stack.dense, stack.moe, form, group_name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        size = hidden.shape[-1:]
        for dense, moe in zip(self.dense, self.moe, strict=True):
            if self.form == "sequence":
                mixed = dense(gather_rows(F.rms_norm(hidden, size), 2, self.group_name))[: len(hidden)]
            else:
                mixed = sum_over_ranks(dense(F.rms_norm(hidden, size)), self.group_name)
            hidden = hidden + mixed
            routed = moe(F.rms_norm(hidden, size))
            if self.form == "sharded widths":
                routed = sum_over_ranks(routed, self.group_name)
            hidden = hidden + routed
        if self.form == "gathered outputs":
            return gather_rows(hidden, 2, self.group_name)
        return hidden


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("form", ["sums", "sharded widths", "sequence", "gathered outputs"])
def test_other_parallelism_around_local_experts_is_not_refused(form: str) -> None:
    with pretend_rank(0, 2) as name:
        (plan,) = plans_of(TensorParallel(form, name), hidden_states(CONFIG, 12, 0))
    assert plan.refusals == ()
    assert [block.name for block in plan.blocks] == ["moe.0.experts", "moe.1.experts"]
    assert re.match(
        r"every expert bank is already on the compute device; \d collectives stay in the graph \(.*\), none of them "
        "around experts",
        plan.reason,
    )


def test_exchanges_of_heads_are_not_refused() -> None:
    def attention(heads: torch.Tensor, name: str) -> torch.Tensor:
        return exchange_rows(heads, [1, 1], [1, 1], name) * 2

    with pretend_rank(0, 2) as name:
        (plan,) = plans_of(lambda heads: attention(heads, name), torch.randn(2, 3, 4, 5))
    assert plan.refusals == ()
    assert "1 collective stays in the graph (1 all_to_all)" in plan.reason


# ------------------------------------------------------------------------------------------------------ lines and names


class DependsOnInput(AllReduceExperts):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.thresholds = nn.Parameter(torch.zeros(self.gate_up_proj.shape[2]), requires_grad=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows, order = self.run_some(hidden_states, self.to_local(top_k_index))
        return sum_over_ranks(weighted_sum(rows * self.thresholds, order, top_k_weights), self.group_name)


def test_a_parameter_is_named_as_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EP_FORMS, "all_reduce", DependsOnInput)
    with pretend_rank(0, 2):
        (plan,) = plans_of(build_stack(CONFIG, "all_reduce"), hidden_states(CONFIG, 12, 0))
    (refusal,) = plan.refusals
    assert "input `moe.0.experts.thresholds`" in refusal.reason
    assert "expected its rows and counts" in refusal.reason


@pytest.mark.slow
def test_a_refusal_points_to_the_wrong_line() -> None:
    class Clamped(AllToAllExperts):
        def _run_arrived(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
            return super()._run_arrived(rows, arriving).clamp(-2, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EP_FORMS, "all_to_all", Clamped)
        captured = capture(CONFIG, "all_to_all", 0, 2, 12)
    plan = _plan(captured)
    (refusal,) = plan.refusals
    assert re.match(r"test_refusals.py:\d+, in _run_arrived: return super\(\)\._run_arrived", refusal.source_line)
    assert "clamp" in refusal.node
    assert str(refusal) == f"moe.0.experts ({refusal.source_line}): {refusal.reason}"
    assert Plan.from_json(plan.to_json()).refusals == plan.refusals


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['hidden_states']", "hidden_states"),
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['self'].layers[0].experts.gate_up_proj", "layers.0.experts.gate_up_proj"),
        ("L['model']._modules['head']._buffers['scale']", "model.head.scale"),
        ("G['table']", "G['table']"),
    ],
)
def test_names_of_inputs(source: str, name: str) -> None:
    assert name_of_source(source) == name


def test_source_lines_and_names_of_nodes() -> None:
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("arg3_1")
    placeholder.meta["val"] = torch.empty(2, 3)
    made = graph.call_function(torch.ops.aten.relu.default, (placeholder,))
    follows = graph.call_function(torch.ops.aten.relu.default, (made,))
    made.meta["stack_trace"] = (
        f'  File "/home/me/model.py", line 7, in forward\n    x = helper(x)\n        ^^^^\n'
        f'  File "/home/me/helpers.py", line 3, in helper\n    return relu({"x" * 200})\n'
        f'  File "{torch.__path__[0]}/nn/functional.py", line 1, in relu\n    return torch.relu(input)\n'
    )
    assert source_line(made).startswith("helpers.py:3, in helper: return relu(xxx")
    assert source_line(made).endswith("...")
    assert len(source_line(made)) < 140
    assert place_of(made) == "model.py:7, in forward"
    assert source_line(follows) == source_line(made)
    assert (source_line(placeholder), place_of(placeholder)) == ("", "arg3_1")
    assert input_name(placeholder) == "input 1 of the graph (float32 [2, 3])"
    assert describe_node(made) == f"`aten.relu.default` ({source_line(made)})"
    made.meta["stack_trace"] = '  File "/m/a.py", line 9, in torch_dynamo_resume_in_forward_at_5\n    y = 1\n'
    assert source_line(made) == "a.py:9, in forward: y = 1"


def test_a_refusal_without_a_reason_is_a_mistake() -> None:
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("x")
    for reason in ("", " "):
        with pytest.raises(ValueError, match=r"the refusal of layers.0.experts at x \(x\) has no reason"):
            refusal_of(graph, reason, placeholder, "layers.0.experts", "0")


class _Distributed(torch.nn.Module):
    """A router whose weight is sharded as a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(4, 6, bias=False)
        mesh = init_device_mesh("cpu", (2,))
        self.router.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]), False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.router.weight.to_local().t()


def test_parts_of_distributed_parameters_are_called_as_the_parameter() -> None:
    names: list[str] = []

    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        def name(captured: GraphModule, fake_inputs: Sequence[Any]) -> Any:
            name_inputs(captured, graph)
            names.extend(input_name(node) for node in graph_inputs(captured.graph))
            return make_boxed_func(captured.forward)

        return aot_autograd(fw_compiler=name, inference_compiler=name)(graph, example_inputs)

    torch._dynamo.reset()
    with pretend_rank(0, 2), torch.no_grad():
        torch.compile(_Distributed(), backend=backend, fullgraph=True)(torch.ones(2, 4))
    assert set(names) == {"hidden_states", "router.weight"}
