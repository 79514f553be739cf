"""Ranks compare everything in their graphs that results depend on; values that cannot be compared are refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import moepass.passes.blocks.lower_complete_experts  # noqa: F401  registers the operator
from moepass.models.reference.expert_parallel import EP_FORMS
from moepass.models.reference.grouped_experts import grouped_gemm
from moepass.passes.graph.canonical_text import CanonicalText, describe_constant
from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.parallel.replicated import Origin, ReplicatedValues
from tests.helpers.graphs.eliminated_graphs import eliminate
from tests.helpers.graphs.simulated_ranks import capture
from tests.helpers.models.moe_stack import StackConfig

GROUP = "0"
c10d = torch.ops._c10d_functional


@torch.library.custom_op("compared_whole::act", mutates_args=())
def _act(values: torch.Tensor) -> torch.Tensor:
    return values.sin()


@_act.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


def _traced(function: Callable[..., torch.Tensor], *, static: bool = True) -> GraphModule:
    mode = "fake" if static else "symbolic"
    trace = make_fx(functionalize(function), tracing_mode=mode, _allow_non_fake_inputs=True)
    return trace(torch.rand(4, 4), torch.rand(6, 4))


def _origin(function: Callable[..., torch.Tensor], *, static: bool = True) -> Origin:
    """Return the origin of the outputs of `function` for inputs [4, 4] and [6, 4]."""
    module = _traced(function, static=static)
    return ReplicatedValues(module.graph, GROUP).origin(module.graph.output_node().all_input_nodes)


def _inputs(function: Callable[..., torch.Tensor], *, static: bool = True) -> list[int]:
    """Return the indices of the inputs whose contents ranks compare."""
    names = [node.name for node in graph_inputs(_traced(function, static=static).graph)]
    return [names.index(name) for name in _origin(function, static=static).inputs]


def _ordered_by(values: torch.Tensor) -> torch.Tensor:
    return values[:, 0].argsort()


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


def _filled_where(places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    filled = torch.empty_like(values)
    filled[places] = values
    return filled


def _copied(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    target.copy_(values)
    return target


def _filled_at_first(values: torch.Tensor) -> torch.Tensor:
    filled = torch.empty_like(values)
    filled[:2] = values[:2]
    return filled


def _filled_by_parts(values: torch.Tensor) -> torch.Tensor:
    filled = torch.empty_like(values)
    filled[:] = values
    return filled


RANDOM = {
    "noise": lambda x, y: x + torch.randn_like(x),
    "dropout": lambda x, y: torch.nn.functional.dropout(x, 0.5, training=True),
    "drawn": lambda x, y: x * torch.rand(4, 4),
    "chosen": lambda x, y: torch.multinomial(x, 2),
    "permuted": lambda x, y: x[torch.randperm(4)],
}
UNWRITTEN = {
    "empty": lambda x, y: x + torch.empty(4, 4),
    "empty_like": lambda x, y: x + torch.empty_like(x),
    "new_empty": lambda x, y: x + x.new_empty(4, 4).view(4, 4),
    "empty_strided": lambda x, y: x + torch.empty_strided((4, 4), (4, 1)),
    "in part": lambda x, y: _filled_at_first(x),
    "at places that may repeat": lambda x, y: _filled_where((x[:, 0] * 3).to(torch.int64), x),
    "at places of a narrow type": lambda x, y: _filled_where(_ordered_by(x).to(torch.int8).to(torch.int64), x),
    "added to": lambda x, y: torch.empty_like(x).index_put([_ordered_by(x)], x, accumulate=True),
    "behind its end": lambda x, y: torch.ops.aten.resize.default(x, [5, 5]),
}
UNKNOWN = {
    "operator": lambda x, y: torch.ops.compared_whole.act(x) * 2,
    "in a branch": lambda x, y: torch.cond(x.sum() > 0, lambda v: torch.ops.compared_whole.act(v), torch.cos, [x]),
}


def _reason(function: Callable[..., torch.Tensor]) -> str:
    with pytest.raises(NotThisForm, match="so all must have the same tokens, but these depend on ") as caught:
        _origin(function)
    return str(caught.value)


@pytest.mark.parametrize("what", RANDOM)
def test_random_numbers_are_not_the_same_on_all_ranks(what: str) -> None:
    assert "draws random numbers; call model.eval(), or" in _reason(RANDOM[what])


@pytest.mark.parametrize("what", UNWRITTEN)
def test_memory_that_nothing_was_written_to_is_not_the_same_on_all_ranks(what: str) -> None:
    assert "gives memory that nothing was written to; fill all of it" in _reason(UNWRITTEN[what])


@pytest.mark.parametrize("what", UNKNOWN)
def test_equal_names_of_unknown_operators_prove_nothing(what: str) -> None:
    reason = _reason(UNKNOWN[what])
    assert "compared_whole.act.default" in reason
    assert "an operator that moepass does not know, so ranks may compute different results; write it in" in reason


def test_equal_values_may_have_another_memory_layout() -> None:
    reason = _reason(lambda x, y: y + x.as_strided((1, 4), (1, 1)))
    assert "aten.as_strided.default" in reason
    assert "reads elements by their position in memory" in reason


def _summed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, y: c10d.all_reduce(function(x, y), "sum", GROUP)


def test_all_reduced_values_are_equal_on_all_ranks() -> None:
    for function in (*RANDOM.values(), *UNWRITTEN.values(), *UNKNOWN.values()):
        assert _inputs(_summed(function)) == []


SAME = {
    "dropout that is off": (lambda x, y: torch.nn.functional.dropout(x, 0.5, training=False), [0]),
    "an inverse order": (lambda x, y: x[_inverse(_ordered_by(x))], [0]),
    "rows in an order": (lambda x, y: _filled_where(_ordered_by(x), x), [0]),
    "rows in an inverse order": (lambda x, y: _filled_where(_inverse(_ordered_by(x)), x), [0]),
    "a copy": (lambda x, y: _copied(torch.empty_like(x), x), [0]),
    "a slice of all": (lambda x, y: _filled_by_parts(x), [0]),
    "a filling": (lambda x, y: x + torch.empty_like(x).fill_(2.0), [0]),
    "ones of a size": (lambda x, y: x + torch.ones_like(torch.empty_like(x)), [0]),
    "a branch": (lambda x, y: torch.cond(x.sum() > 0, torch.sin, torch.cos, [x]), [0]),
    "a result in the memory of another": (lambda x, y: _copied(y[:4] * 2, c10d.all_reduce(x, "sum", GROUP)), []),
}


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("what", SAME)
@pytest.mark.parametrize("static", [True, False])
def test_values_computed_from_equal_inputs_are_taken(what: str, static: bool) -> None:
    function, inputs = SAME[what]
    assert _inputs(function, static=static) == inputs


def test_sizes_that_may_differ_by_rank_are_compared() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.ones_like(y).sum()

    assert _inputs(scaled) == [0], "the size of the second is a constant"
    assert _inputs(scaled, static=False) == [0, 1]


def test_calls_of_another_group_are_not_counted() -> None:
    """One rank may be in more groups than another."""

    def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return c10d.all_reduce(x, "sum", GROUP)

    def after_another(group: str) -> Callable[..., torch.Tensor]:
        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return c10d.all_reduce(x * c10d.all_reduce(y, "sum", group).sum(), "sum", GROUP)

        return function

    assert _origin(after_another("7")) == _origin(summed)
    assert _origin(after_another(GROUP)) != _origin(summed)


@pytest.mark.parametrize("group", [GROUP, "7"])
def test_complete_experts_are_those_of_their_group(group: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        layer = torch.zeros((), dtype=torch.int64)
        (complete,) = torch.ops.moepass.complete_experts(layer, [y], [0, 6, 12], group, True)
        result: torch.Tensor = complete[:4] * x
        return result

    if group == GROUP:
        assert _inputs(function) == [0]
    else:
        assert "results differ by rank" in _reason(function)


def _branching(factor: float) -> Callable[..., torch.Tensor]:
    constant = torch.full((4,), factor)
    return lambda x, y: torch.cond(x.sum() > 0, lambda v: v * constant, lambda v: v.cos(), [x])


def test_branches_are_compared_with_their_constants() -> None:
    assert _origin(_branching(2.0)) == _origin(_branching(2.0))
    assert _origin(_branching(2.0)) != _origin(_branching(3.0))


def _with_constant(factor: float) -> GraphModule:
    graph = Graph()
    module = torch.nn.Module()
    module.factor = torch.full((4,), factor)
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("factor"))))
    return GraphModule(module, graph)


def test_equal_constants_have_equal_texts_and_others_do_not() -> None:
    values = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    distinct: list[object] = [
        values, values.conj(), values.conj().imag, values.real, values[:0], torch.zeros(4, 0), torch.tensor(True),
        _with_constant(2.0), _with_constant(3.0), 3, 3.0, True, None, "3", [values, 3], torch.float32, torch.strided,
        torch.ops.aten.add.Tensor, torch.ops.higher_order.cond, torch.device("cpu"),
    ]  # fmt: skip
    texts = [describe_constant(value) for value in distinct]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if re.search(r"0x[0-9a-f]{6}|\d{12}(?![0-9a-f])", text)], "an address"
    assert describe_constant(_with_constant(2.0)) == describe_constant(_with_constant(2.0))
    assert describe_constant(values.conj()) == describe_constant(values.conj().clone().resolve_conj())


def test_a_constant_without_contents_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.zeros(3)
    for value in (fake, torch.zeros(3, device="meta"), torch.zeros(3).to_sparse(), object()):
        with pytest.raises(NotThisForm, match=r"it reads a constant of type .*; expected "):
            describe_constant(value)


def test_functions_are_called_the_same_on_all_ranks() -> None:
    graph = Graph()
    first = graph.placeholder("x")
    larger = graph.call_function(torch.sym_max, (first, 3))

    def describe(node: Node) -> str:
        return "a number"

    text = CanonicalText(describe)
    text.add(larger)
    assert str(text).splitlines()[-1] == "torch.sym_max ((%0, 3), {})"


def _digests_of_experts(factor_of: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return, by rank, the digests of its blocks; rank r multiplies by `factor_of(r)`, read from a tensor."""

    class Experts(EP_FORMS["all_to_all"]):  # type: ignore[misc]
        def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
            factor = torch.arange(factor_of(self.placement.rank)).sum().item()
            return grouped_gemm(nn.functional.silu(gate) * up * factor, self.down_proj.transpose(1, 2), ends)

    monkeypatch.setitem(EP_FORMS, "all_to_all", Experts)
    experts_by_rank = []
    for rank in range(2):
        captured = capture(
            StackConfig(layers=1, hidden=16, width=16, experts=4), "all_to_all", rank, 2, 9, moe_alone=True
        )
        result = eliminate(captured)
        experts_by_rank.append([block.experts for block in result.plan.local_blocks])
    return experts_by_rank


@pytest.mark.slow
def test_numbers_that_are_read_off_constants_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _digests_of_experts(lambda rank: 4 + rank, monkeypatch)
    assert first != second or not first, "what differs must show, or be refused"


@pytest.mark.slow
def test_equal_numbers_that_are_read_off_constants_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _digests_of_experts(lambda rank: 4, monkeypatch)
    assert first == second
