"""Facts about nodes: which ones share memory with their inputs, and which ones draw random numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Node

import moepass
from moepass.passes.graph.nodes import graphs_within
from moepass.passes.ops import traits
from moepass.passes.ops.traits import draws_random_numbers, is_view, mutates
from moepass.passes.ops.walk import view_source
from tests.helpers.graphs.backend_helper import DenseBlock, capture, tokens

aten = torch.ops.aten


def _calls(function: Callable[..., object], *inputs: torch.Tensor) -> list[Node]:
    return [node for node in capture(function, *inputs).module.graph.nodes if node.op == "call_function"]


def test_views_that_no_schema_declares_share_memory() -> None:
    """The table contains neither operators whose schema declares a view, nor operators that allocate their results."""
    arguments = {
        aten._unsafe_view.default: ([4],),
        aten.unsafe_split.Tensor: (1,),
        aten.unsafe_split_with_sizes.default: ([1, 1],),
    }
    for operator in traits._UNDECLARED_VIEWS:
        value = torch.ones(2, 2)
        assert all(returned.alias_info is None for returned in operator._schema.returns)
        results = operator(value, *arguments.get(operator, ()))
        first = results if isinstance(results, torch.Tensor) else results[0]
        assert first.untyped_storage().data_ptr() == value.untyped_storage().data_ptr(), operator


@pytest.mark.slow
def test_no_other_operator_returns_an_undeclared_view() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.graphs.undeclared_views"],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    # The functional form of set_, which AOT does not capture.
    views = set(finished.stdout.split()) - {"aten.set.source_Tensor"}
    assert "aten.unsafe_split.Tensor" in views
    assert views <= {str(operator) for operator in traits._UNDECLARED_VIEWS}


@pytest.mark.parametrize(
    "function", [lambda x: torch.unsafe_chunk(x, 2)[1] + 1, lambda x: torch.unsafe_split_with_sizes(x, [2, 2])[1] + 1]
)
def test_parts_of_an_unsafe_split_are_views(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    *views, last = _calls(function, torch.ones(4, 2))
    assert len(views) >= 2
    assert all(is_view(node) for node in views)
    assert not is_view(last)
    assert view_source(views[-1]).op == "placeholder"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_parts_of_weights_are_read_before_the_release(lower: str, no_grad: None) -> None:
    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(DenseBlock(seed=layer) for layer in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chunk = torch.unsafe_chunk(self.blocks[0].up, 2, 1)[0]
            y = x
            for block in self.blocks:
                y = block(y, x)
            return y + chunk.sum()

    model = Splits()
    expected = model(tokens())
    moepass.offload_experts(model, slots=2)
    compiled = torch.compile(model, backend="asyncep", options={"lower": lower, "debug": True})
    # Outputs go up to 540, so values near 0 have lost digits, which depend on the CPU's order of summation.
    difference = float((compiled(tokens()) - expected).abs().max() / expected.abs().max())
    assert difference <= {"eager": 0, "inductor": 1e-6}[lower]


RANDOM: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "dropout": (lambda x: nn.functional.dropout(x, 0.5), True),
    "noise": (lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1), True),
    "normal": (lambda x: x + torch.randn(4), True),
    "permutation": (lambda x: x[torch.randperm(4)], True),
    "sample": (lambda x: torch.multinomial(x, 2), True),
    "leaky slope": (lambda x: nn.functional.rrelu(x, training=True), True),
    "mean slope": (lambda x: nn.functional.rrelu(x, training=False), False),
    "attention": (
        lambda x: nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        False,
    ),
    "no dropout": (lambda x: nn.functional.dropout(x, 0.5, training=False) + 1, False),
}


@pytest.mark.parametrize("name", RANDOM)
def test_operators_that_draw_random_numbers(name: str) -> None:
    function, random = RANDOM[name]
    assert any(draws_random_numbers(node) for node in _calls(function, torch.rand(4, 4))) == random


def test_attention_with_dropout_draws_random_numbers() -> None:
    node = torch.fx.Graph().call_function(aten._scaled_dot_product_flash_attention_for_cpu.default, (None,) * 3)
    assert not draws_random_numbers(node)
    node.args = (*node.args, 0.1)
    assert draws_random_numbers(node)


def test_an_update_of_a_buffer_is_a_mutation() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x.view(-1) * self.calls

    assert [str(node.target) for node in _calls(Counts(), torch.ones(2, 2)) if mutates(node)] == ["aten.copy_.default"]


def test_branches_are_part_of_a_graph() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.max() > 1, torch.sin, torch.cos, (x,))

        return torch.cond(x.sum() > 0, inner, torch.exp, (x,))

    module = capture(branches, torch.ones(3)).module
    targets = {str(node.target) for inside in graphs_within(module) for node in inside.nodes}
    assert {"aten.sin.default", "aten.cos.default", "aten.exp.default", "aten.sum.default"} <= targets
