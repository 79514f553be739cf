"""The form that a run takes: the rule, the plan's reason, and the captured graph that is compiled later."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.fx import GraphModule

import moepass
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.options import parse_options
from moepass.passes.graph.input_sizes import SizeSource, read_sizes, size_sources
from moepass.passes.ir.plan import Dispatch, Plan
from moepass.passes.planner.all_to_all_crossover import CrossoverEstimate
from moepass.passes.schedule.dispatch import EXCHANGED, GATHERED, HYSTERESIS, choose_form
from moepass.runtime.lowering.lower_later import lower_later
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.ranks.agreement import RunVote
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.processes.ranks import run_ranks

FORMS = [None, GATHERED, EXCHANGED]
_numbers = st.integers(0, 10**6)
_crossovers = st.integers(1, 10**5)
_ranks = st.integers(1, 64)
_hysteresis = st.floats(0.0, 0.5)


@given(_numbers, _ranks, _crossovers, _hysteresis, st.sampled_from(FORMS))
def test_far_from_the_crossover_the_last_form_is_of_no_account(
    total: int, ranks: int, crossover: int, hysteresis: float, last: str | None
) -> None:
    form = choose_form(total, ranks, crossover, hysteresis, last)
    assert form in (GATHERED, EXCHANGED)
    if total < crossover * (1 - hysteresis) * ranks:
        assert form == EXCHANGED
    elif total >= crossover * (1 + hysteresis) * ranks:
        assert form == GATHERED
    else:
        assert form == (last or (EXCHANGED if total < crossover * ranks else GATHERED))


@given(st.data(), _ranks, _crossovers, st.floats(0.01, 0.5), st.sampled_from(FORMS))
def test_the_form_does_not_change_near_the_crossover(
    data: st.DataObject, ranks: int, crossover: int, hysteresis: float, last: str | None
) -> None:
    least = math.ceil(crossover * (1 - hysteresis) * ranks)
    most = math.ceil(crossover * (1 + hysteresis) * ranks) - 1
    totals = data.draw(st.lists(st.integers(least, max(least, most)), min_size=2, max_size=20))
    assume(least <= most)
    seen = []
    for total in totals:
        last = choose_form(total, ranks, crossover, hysteresis, last)
        seen.append(last)
    assert len(set(seen)) == 1


@given(_numbers, _numbers, _ranks, _crossovers, _hysteresis, st.sampled_from(FORMS))
def test_more_tokens_never_turn_gathering_into_exchanging(
    some: int, more: int, ranks: int, crossover: int, hysteresis: float, last: str | None
) -> None:
    few, many = sorted((some, more))
    if choose_form(few, ranks, crossover, hysteresis, last) == GATHERED:
        assert choose_form(many, ranks, crossover, hysteresis, last) == GATHERED


@pytest.mark.parametrize("below", [0, -1, 2**53 + 1, 1.5, True, "10", float("inf")])
def test_invalid_numbers_of_tokens_are_refused(below: object) -> None:
    with pytest.raises(
        moepass.OptionError, match=r"option all_to_all_below is .*; it must be a number of tokens per rank"
    ):
        parse_options({"all_to_all_below": below})


def test_a_crossover_is_taken() -> None:
    assert parse_options({"all_to_all_below": 2**53}).all_to_all_below == 2**53
    assert parse_options({"all_to_all_below": None}).all_to_all_below is None


def test_offloaded_models_have_no_exchange_to_keep() -> None:
    model = Stack(depth=1)
    moepass.offload_experts(model)
    with pytest.raises(
        moepass.OptionError, match="option all_to_all_below is 8, but the experts of this model were offloaded"
    ):
        _run(model, all_to_all_below=8)


def _run(model: torch.nn.Module, **options: Any) -> list[Plan]:
    with torch.no_grad(), moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options={"lower": "eager", **options})(tokens())
    return [compilation.plan for compilation in compilations]


def test_where_nothing_was_exchanged_the_plan_says_that_the_option_has_no_effect() -> None:
    (plan,) = _run(Stack(depth=1), all_to_all_below=8)
    assert plan.dispatch is None
    (refusal,) = plan.refusals
    assert refusal.where == "option all_to_all_below"
    assert refusal.reason == (
        "8 has no effect: no expert parallelism was eliminated from the graph, so it has only one form"
    )
    assert _run(Stack(depth=1))[0].refusals == ()


def _captured(function: Any, *inputs: torch.Tensor) -> GraphModule:
    """Return the graph that AOT captures of `function`, with symbolic first dimensions."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    for value in inputs:
        torch._dynamo.mark_dynamic(value, 0)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep), fullgraph=True)(
            *inputs
        )
    return graphs[0]


def _total(scores: torch.Tensor) -> torch.Tensor:
    """A sum, which Inductor computes in parts if there are more than 4096 numbers."""
    return scores.sum(0, keepdim=True)


def _arguments(graph: GraphModule, value: torch.Tensor) -> list[Any]:
    """Return the graph's arguments: `value` for every tensor, and its length for every size."""
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    return [value if isinstance(shown, torch.Tensor) else len(value) for shown in inputs]


def test_sizes_are_read_from_inputs() -> None:
    graph = _captured(lambda left, right: left.sum(dim=0) + right.sum(dim=0), torch.ones(5, 3), torch.ones(7, 3))
    sources = size_sources(graph.graph)
    assert list(read_sizes(sources, _arguments(graph, torch.ones(9, 3))).values()) == [9, 9]
    assert SizeSource(2, 1).read([0, 0, torch.ones(4, 3)]) == 3


@pytest.mark.slow
def test_a_graph_compiled_late_knows_for_which_sizes_it_is_right() -> None:
    graph = _captured(_total, torch.arange(100.0))
    sources = size_sources(graph.graph)
    compiled = []
    for size in (50, 40_000, 60, 1):
        arguments = _arguments(graph, torch.ones(size))
        sizes = read_sizes(sources, arguments)
        right = [program for program in compiled if program.is_right_for(sizes)]
        if not right:
            right = [lower_later(graph, sizes, "inductor")]
            compiled += right
        assert right[0].is_right_for(sizes)
        (output,) = right[0].run(*arguments)
        assert output == size
    assert not compiled[0].is_right_for(dict.fromkeys(sources, 40_000))
    assert not compiled[1].is_right_for(dict.fromkeys(sources, 60))


@pytest.mark.parametrize("is_stable", [False, True])
def test_a_compiled_sort_is_right_for_any_number_of_values(is_stable: bool) -> None:
    """Inductor would use 16-bit indices and add a guard, so that a server would compile again for a long prompt."""
    graph = _captured(lambda scores: scores.sort(stable=is_stable).indices, torch.arange(100.0))
    sources = size_sources(graph.graph)
    compiled = lower_later(graph, dict.fromkeys(sources, 50), "inductor")
    for size in (2, 50, 32_766, 32_767, 70_000):
        assert compiled.is_right_for(dict.fromkeys(sources, size))
        (output,) = compiled.run(*_arguments(graph, torch.arange(float(size)).flip(0)))
        assert torch.equal(output, torch.arange(size).flip(0))


def test_code_compiled_for_rows_does_not_run_without_rows() -> None:
    """A symbolic size is assumed to be positive: without rows, reading the last row would be out of bounds."""
    graph = _captured(lambda rows: rows[-1] * 2, torch.ones(16, 3))
    sources = size_sources(graph.graph)
    some, none = dict.fromkeys(sources, 8), dict.fromkeys(sources, 0)
    compiled = lower_later(graph, some, "inductor")
    assert compiled.is_right_for(some)
    assert compiled.is_right_for(dict.fromkeys(sources, 1))
    assert not compiled.is_right_for(none)


def _plans(form: str, disable: tuple[str, ...], **crossover: Any) -> Plan:
    torch._dynamo.config.capture_scalar_outputs = True
    config = StackConfig(layers=2)
    options = {"lower": "eager", "disable": disable, **(crossover or {"all_to_all_below": 64})}
    with torch.no_grad(), moepass.record_compilations() as compilations:
        hidden = torch.randn(24, config.hidden)
        torch._dynamo.mark_dynamic(hidden, 0)
        torch.compile(build_stack(config, form), backend="asyncep", fullgraph=True, options=options)(hidden)
    return compilations[0].plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["all_to_all", *(pytest.param(form, marks=pytest.mark.slow) for form in EP_FORMS if form != "all_to_all")]
)
def test_the_plan_counts_the_tokens_of_every_form(form: str) -> None:
    plan, _ = run_ranks(2, _plans, form, ())
    assert plan.dispatch is not None
    ((symbol, size),) = plan.sizes
    assert dataclasses.astuple(plan.dispatch)[:3] == (64, HYSTERESIS, symbol)
    assert size == 24
    assert "below 64 tokens per rank" in plan.dispatch.reason


@pytest.mark.slow
def test_a_graph_that_keeps_its_exchanges_has_one_form() -> None:
    for plan in run_ranks(2, _plans, "all_to_all", ("eliminate_expert_parallelism",)):
        assert plan.dispatch is None
        assert [refusal.where for refusal in plan.refusals] == ["option all_to_all_below"]


@pytest.mark.parametrize("value", [7, b"8xh100-80g", ["8xh100-80g"]])
def test_invalid_machines_are_refused(value: object) -> None:
    with pytest.raises(moepass.OptionError, match=r"option hardware is .*; it must be a preset such as 8xh100-80g"):
        parse_options({"hardware": value})


def test_a_crossover_is_given_or_computed_not_both() -> None:
    with refused(moepass.OptionError, name="all_to_all_below", value=8):
        parse_options({"all_to_all_below": 8, "hardware": "8xh100-80g"})


def test_a_machine_has_no_effect_on_graphs_without_exchanges() -> None:
    (plan,) = _run(Stack(depth=1), hardware="8xh100-80g")
    assert plan.dispatch is None
    assert [refusal.where for refusal in plan.refusals] == ["option hardware"]
    assert plan.refusals[0].reason.startswith("8xh100-80g has no effect: no expert parallelism was eliminated from")


def _with_profile(form: str) -> Plan:
    return _plans(form, (), hardware="8xh100-80g")


@pytest.mark.slow
def test_a_profile_determines_the_crossover_and_its_reason() -> None:
    plan, plan_of_second_rank = run_ranks(2, _with_profile, "all_to_all")
    assert plan.dispatch is not None
    assert plan.dispatch == plan_of_second_rank.dispatch
    assert plan.dispatch.is_estimated
    assert "by profile 8xh100-80g a gathered run takes at least the" in plan.dispatch.reason
    estimate = CrossoverEstimate(
        plan, sympy.Symbol(plan.dispatch.tokens), load_hardware("8xh100-80g"), ranks=2, slots=plan.slots
    )
    assert plan.dispatch.crossover_tokens == estimate.crossover_tokens()
    assert Plan.from_json(plan.to_json()) == plan


def test_estimated_crossovers_of_ranks_need_not_be_equal() -> None:
    """One rank is at half of its crossover and one at twice its own, which is above it on average."""
    dispatches = [Dispatch(crossover, 0.0, "n", "", is_estimated=True) for crossover in (100, 40)]
    present = [RunVote.of(dispatch, tokens, ()) for dispatch, tokens in zip(dispatches, (50, 80), strict=True)]
    assert [vote.crossover_tokens for vote in present] == [1, 1]
    assert choose_form(sum(vote.tokens for vote in present), 2, 1, 0.0, None) == GATHERED
    assert choose_form(present[0].tokens, 1, 1, 0.0, None) == EXCHANGED
    assert RunVote.of(dataclasses.replace(dispatches[0], is_estimated=False), 50, ()).crossover_tokens == 100
