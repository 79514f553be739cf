"""The pass protocol: contracts, order, and a bad pass that breaks each invariant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from moepass.models.errors import OptionError
from moepass.passes.graph.nodes import copy_graph_module
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import (
    INVARIANTS,
    Pass,
    PassContext,
    PassError,
    PassResult,
    check_order,
    graph_pass,
    run_passes,
)
from moepass.passes.ir.slot_operations import gather
from moepass.passes.pipeline import PASSES, compile_graph
from tests.helpers.graphs.backend_helper import Stack, capture, find, fingerprint, streamed, tokens
from tests.helpers.graphs.error_fields import refused

NAMES = [function.__name__ for function in PASSES]


def test_the_pipeline_is_in_an_order_that_its_contracts_allow() -> None:
    check_order(PASSES, frozenset())
    assert len(set(NAMES)) == len(NAMES)
    provided: set[str] = set()
    for function in PASSES:
        assert function.contract.requires <= provided
        provided |= function.contract.provides


@pytest.mark.parametrize("name", [function.__name__ for function in PASSES if function.contract.requires])
def test_no_pass_runs_before_its_requirements(name: str) -> None:
    position = NAMES.index(name)
    moved = (PASSES[position], *PASSES[:position], *PASSES[position + 1 :])
    with refused(OptionError, name=name):
        check_order(moved, frozenset())


def test_passes_that_rewrite_experts_precede_the_detection_of_blocks() -> None:
    for name in ("eliminate_expert_parallelism", "compute_read_slots", "lower_expert_stacks", "lower_complete_experts"):
        moved = PASSES[NAMES.index(name)]
        with refused(OptionError, name=name, value=["blocks"]):
            check_order((*[function for function in PASSES if function is not moved], moved), frozenset())


def test_rewriting_after_scheduling_is_a_conflict() -> None:
    again = (*PASSES, PASSES[NAMES.index("rewrite")])
    with refused(OptionError, name="rewrite", value=["scheduled"]):
        check_order(again, frozenset())


@pytest.mark.parametrize(
    ("disabled", "message"),
    [
        ({"detect"}, "pass rewrite needs blocks, which detect provides: do not disable it, or disable rewrite too"),
        ({"rewrite"}, "pass plan needs canonical, which rewrite provides"),
        ({"plan"}, "pass schedule needs planned, which plan provides"),
        ({"schedule"}, "pass verify needs scheduled, which schedule provides"),
        (
            set(NAMES) - {"eliminate_expert_parallelism", "partition"},
            "pass partition needs blocks, which detect provides",
        ),
        ({"nope", "verify"}, f"no pass is called nope; the passes are {', '.join(NAMES)}"),
    ],
)
def test_disabling_a_required_pass_names_both_passes(disabled: set[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_order(PASSES, frozenset(disabled))


def test_the_order_is_checked_before_anything_runs() -> None:
    ran: list[str] = []

    @graph_pass(provides={"first"})
    def first(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
        ran.append("first")
        return PassResult(module, plan)

    @graph_pass(requires={"nothing provides this"})
    def second(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
        return PassResult(module, plan)

    module = capture(torch.nn.Linear(2, 2).requires_grad_(False), torch.randn(1, 2)).module
    with refused(OptionError, name="second", expected=["nothing provides this"]):
        run_passes((first, second), module, Plan(), PassContext())
    assert ran == []


def test_observers_see_every_stage_and_disabled_passes_do_not_run() -> None:
    seen: list[str] = []
    module = capture(Stack(depth=1), tokens()).module
    compile_graph(module, PassContext(disabled=frozenset({"verify"})), lambda name, module, plan: seen.append(name))
    assert seen == ["captured", *(name for name in NAMES if name != "verify")]


def test_matches_and_refusals_of_all_passes_are_collected() -> None:
    result = compile_graph(streamed(Stack(depth=2), tokens()).module, PassContext())
    assert {match.split(":")[0] for match in result.matches} == set(NAMES) - {
        "sort_masks",
        "write_grouped_gemms",
        "group_exchanged_slots",
        "eliminate_expert_parallelism",
        "compute_chosen_pairs",
        "look_up_one_hots",
        "compute_read_slots",
        "lower_expert_stacks",
        "lower_complete_experts",
        "sink_token_gather",
        "hoist_token_return",
        "activation_memory",
        "hybrid_prefill",
        "cost",
        "bank_parts",
        "fp8_slots",
        "predict",
    }
    assert result.refusals == result.plan.refusals


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense_bmm", "grouped_mm"])
def test_no_pass_edits_its_input(form: str) -> None:
    inputs: dict[str, GraphModule] = {}
    prints = {}

    def keep(stage: str, module: GraphModule, plan: Plan) -> None:
        inputs[stage], prints[stage] = module, fingerprint(module)

    compile_graph(streamed(Stack(form, depth=2), tokens()).module, PassContext(), keep)
    assert list(inputs) == ["captured", *NAMES]
    assert [stage for stage, module in inputs.items() if fingerprint(module) != prints[stage]] == []


# A bad pass for every invariant


def _use_before_definition(module: GraphModule) -> None:
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    nodes[0].prepend(nodes[-1])


def _lose_a_value(module: GraphModule) -> None:
    del next(node for node in module.graph.nodes if node.op == "call_function").meta["val"]


def _return_something_else(module: GraphModule) -> None:
    module.graph.output_node().args = ((module.graph.find_nodes(op="placeholder")[0],),)


def _drop_a_collective(module: GraphModule) -> None:
    node = next(node for node in module.graph.nodes if "all_reduce" in str(node.target))
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)


BAD: dict[str, Callable[[GraphModule], None]] = {
    "the graph lints": _use_before_definition,
    "every value is described": _lose_a_value,
    "inputs and outputs stay": _return_something_else,
    "collectives keep their order": _drop_a_collective,
}


def _with_collectives() -> GraphModule:
    """Return a captured graph with two all-reduces inserted by hand, which needs no process group."""
    module = copy_graph_module(capture(Stack("dense_bmm", depth=1), tokens()).module)
    target = torch.ops._c10d_functional.all_reduce.default
    for node in [node for node in module.graph.nodes if "bmm" in str(node.target)]:
        with module.graph.inserting_after(node):
            reduced = module.graph.call_function(target, (node, "sum", "0"))
        reduced.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(reduced, delete_user_cb=lambda user, reduced=reduced: user is not reduced)
    return module


def _bad_pass(edit: Callable[[GraphModule], None], reorders: bool = False) -> Pass:
    @graph_pass(reorders_collectives=reorders)
    def bad(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
        edited = copy_graph_module(module)
        edit(edited)
        return PassResult(edited, plan)

    return bad


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_every_invariant_is_broken_by_a_bad_pass_and_caught(invariant: str) -> None:
    module = _with_collectives()
    run_passes((_bad_pass(lambda same: None),), module, Plan(), PassContext())
    assert invariant in BAD, f"invariant {invariant!r} has no bad pass in this test; add one to BAD"
    with refused(PassError, name="bad", expected=invariant):
        run_passes((_bad_pass(BAD[invariant]),), module, Plan(), PassContext())


def test_a_gather_without_a_value_is_caught() -> None:
    def strip(module: GraphModule) -> None:
        del find(module, gather)[0].meta["val"]

    module = streamed(Stack(depth=1), tokens()).module
    with refused(PassError, name="bad", expected="every value is described"):
        run_passes((*PASSES[: NAMES.index("rewrite") + 1], _bad_pass(strip)), module, Plan(), PassContext())


def test_a_pass_may_reorder_collectives_if_it_says_so() -> None:
    run_passes((_bad_pass(_drop_a_collective, reorders=True),), _with_collectives(), Plan(), PassContext())


def test_collectives_inside_segments_count() -> None:
    module = _with_collectives()
    result = compile_graph(module, PassContext())

    def drop(top: GraphModule) -> None:
        segment = next(
            child for child in top.children() if isinstance(child, GraphModule) and "all_reduce" in child.code
        )
        _drop_a_collective(segment)

    run_passes((_bad_pass(lambda same: None),), result.module, result.plan, PassContext())
    assert any("all_reduce" in child.code for child in result.module.children() if isinstance(child, GraphModule))


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_an_output_of_another_type_or_shape_is_caught(change: str) -> None:
    def edit(module: GraphModule) -> None:
        (old,) = module.graph.output_node().args[0]  # type: ignore[misc]
        value = old.meta["val"]  # type: ignore[union-attr]
        with module.graph.inserting_before(module.graph.output_node()):
            new = module.graph.call_function(torch.ops.aten.clone.default, (old,))
        new.meta["val"] = value.double() if change == "dtype" else value[:1]
        module.graph.output_node().args = ((new,),)

    with refused(PassError, expected="inputs and outputs stay"):
        run_passes((_bad_pass(edit),), capture(Stack(depth=1), tokens()).module, Plan(), PassContext())


def test_a_removed_input_is_caught() -> None:
    def edit(module: GraphModule) -> None:
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            module.graph.placeholder("extra").meta["val"] = torch.zeros(1)

    with refused(PassError, expected="inputs and outputs stay"):
        run_passes((_bad_pass(edit),), capture(Stack(depth=1), tokens()).module, Plan(), PassContext())
