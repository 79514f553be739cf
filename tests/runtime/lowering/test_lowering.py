"""Segments compiled by Inductor: each of these tests was once a wrong result or a crash."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import moepass
from moepass.runtime.lowering.lower_later import lower_later
from moepass.runtime.lowering.lower_segments import LOWERINGS
from tests.helpers.graphs.backend_helper import DenseBlock, tokens
from tests.helpers.models.tiny import tiny_inputs, tiny_model


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
def test_depthwise_convolutions_keep_their_layout(no_grad: None) -> None:
    """Inductor's layout optimisation made jamba's second convolution read wrong elements, with an error of 1.5."""
    model = tiny_model("jamba")
    inputs = tiny_inputs(model, batch=3, seq=17)
    expected = model(**inputs).logits
    moepass.offload_experts(model)
    assert relative_difference(torch.compile(model, backend="asyncep")(**inputs).logits, expected) <= 1e-5


@pytest.mark.slow
def test_two_inputs_whose_sizes_turn_out_equal(no_grad: None) -> None:
    """Ids and mask have separate symbols, which the model then asserts to be equal."""
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep")
    with moepass.record_compilations() as compilations:
        for batch, seq in ((3, 17), (5, 9), (2, 30)):
            ids = tiny_inputs(model, batch, seq)["input_ids"]
            mask = torch.ones_like(ids)
            mask[0, seq // 2 :] = 0
            expected = model(input_ids=ids, attention_mask=mask).logits
            for tensor in (ids, mask):
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
            assert relative_difference(compiled(input_ids=ids, attention_mask=mask).logits, expected) <= 1e-5
    assert len(compilations) == 1


def test_a_constant_in_a_segment(no_grad: None) -> None:
    """A tensor that the model creates becomes a constant of the graph. It is real while all other tensors are fake."""
    table = torch.arange(6.0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + table[:3]

    compiled = torch.compile(forward, backend="asyncep", options={"lower": "eager"})
    x = torch.randn(4, 3)
    assert torch.equal(compiled(x), forward(x))


# Copies that Inductor takes for nothing and removes, one after the other in different places.
COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times ones": lambda value: value * torch.ones_like(value),
    "plus zeros": lambda value: value + torch.zeros_like(value),
    "clone of a view": lambda value: value.transpose(1, 2).clone(),
    "two clones": lambda value: value.permute(1, 0, 2).clone().permute(1, 0, 2).clone(),
}


class TwoBlocks(nn.Module):
    """Two blocks, with a hook on a tensor before both."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = DenseBlock(seed=0), DenseBlock(seed=1)
        self.copy = copy


class CopiesWeights(TwoBlocks):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.copy(self.a.up)
        return self.b(self.a(x, x), x), weight


class CopiesState(TwoBlocks):
    """A buffer is copied before the blocks and updated after them."""

    state: torch.Tensor

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor], blocks: bool) -> None:
        super().__init__(copy)
        self.blocks = blocks
        self.register_buffer("state", torch.arange(4 * 6 * 32.0).reshape(4, 6, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.copy(self.state)
        y = self.b(self.a(x, x), x) if self.blocks else x.relu()
        self.state.copy_(self.state * 0.5 + y)
        return y, before


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_weights_survives_the_slot_that_it_was_made_from(name: str, no_grad: None) -> None:
    model = CopiesWeights(COPIES[name])
    expected = COPIES[name](model.a.up).clone()
    moepass.offload_experts(model, slots=1)
    _, weight = torch.compile(model, backend="asyncep", options={"debug": True})(tokens())
    assert torch.equal(weight, expected)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_buffer_survives_its_update(name: str, blocks: bool, no_grad: None) -> None:
    model, plain = CopiesState(COPIES[name], blocks), CopiesState(COPIES[name], blocks)
    if blocks:
        moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep")
    for _ in range(2):
        assert torch.equal(compiled(tokens())[1], plain(tokens())[1])
        torch.testing.assert_close(model.state, plain.state)


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_view_stays_a_view(lower: str, no_grad: None) -> None:
    """Only outputs that were new memory before are copied: a view of an input stays a view."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[1:].transpose(0, 1), x.relu()

    x = torch.randn(4, 3)
    view, _ = torch.compile(forward, backend="asyncep", options={"lower": lower})(x)
    x[2, 1] = 7
    assert view[1, 1] == 7


def _padded_to_8(x: torch.Tensor) -> torch.Tensor:
    padding = (8 - x.shape[1] % 8) % 8
    return nn.functional.pad(x.transpose(1, 2), (0, padding)).reshape(2, -1)


@pytest.mark.parametrize("first", [5, 8])
def test_a_view_of_an_operator_whose_strides_are_not_the_traced_ones(first: int, no_grad: None) -> None:
    """`constant_pad_nd` keeps the strides of its input if the padding is 0, but not if it is traced as a symbol."""
    compiled = torch.compile(_padded_to_8, backend="asyncep", fullgraph=True, options={"lower": "eager"})
    with moepass.record_compilations() as compilations:
        for length in (first, 8, 5, 16):
            x = torch.randn(2, length, 4)
            torch._dynamo.mark_dynamic(x, 1)
            assert torch.equal(compiled(x), _padded_to_8(x))
    assert len(compilations) == 1


def test_a_graph_that_is_lowered_later_asks_for_shapes_too(no_grad: None) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.view.default, (x, [-1])),))
    captured = GraphModule({}, graph)
    value = torch.randn(3, 4).t()
    (result,) = lower_later(captured, {}, "eager").run(value)
    assert torch.equal(result, value.reshape(-1))


def _show(x: torch.Tensor) -> torch.Tensor:
    """Return a view, although the operator's schema does not say so."""
    return x.view(-1)


def test_an_operator_that_hides_that_it_gives_a_view() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    shown = graph.call_function(_show, (x,))
    declared = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
    graph.output((shown, declared))
    for node in (x, shown, declared):
        node.meta["val"] = torch.empty(2, 2)
    run, _ = LOWERINGS["eager"](GraphModule({}, graph))
    value = torch.ones(2, 2)
    copied, view = run(value)
    value.zero_()
    assert copied.tolist() == [1, 1, 1, 1]
    assert view.tolist() == [0, 0, 0, 0]
