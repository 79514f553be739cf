"""Arguments that say what an operator fills its result with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.ops.arguments import fill_number, is_arange


def _made(make: Callable[[torch.Tensor], torch.Tensor]) -> Node:
    """Return the node that `make` creates last."""
    graph = make_fx(make, tracing_mode="fake")(torch.empty(5)).graph
    (result,) = graph.output_node().all_input_nodes
    return result


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: torch.arange(300), True),
        (lambda _: torch.arange(0, 300, dtype=torch.int32), True),
        (lambda _: torch.arange(0, 300, 1), True),
        (lambda _: torch.arange(1, 300), False),
        (lambda _: torch.arange(0, 300, 2), False),
        (lambda _: torch.arange(300, dtype=torch.bfloat16), False),  # bfloat16 cannot represent 257
        (lambda _: torch.zeros(300, dtype=torch.int64), False),
    ],
)
def test_numbers_that_count_up(make: Callable[[torch.Tensor], torch.Tensor], expected: bool) -> None:
    assert is_arange(_made(make)) is expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: torch.zeros(3), 0),
        (lambda values: torch.zeros_like(values), 0),
        (lambda values: values.new_ones(3), 1),
        (lambda _: torch.full((3,), -2.5), -2.5),
        (lambda values: torch.full_like(values, True), True),
        (lambda values: values + 0, None),
        (lambda values: torch.empty_like(values), None),
    ],
)
def test_numbers_everywhere(make: Callable[[torch.Tensor], torch.Tensor], expected: float | None) -> None:
    number = fill_number(_made(make))
    assert number == expected
    assert (number is None) == (expected is None)
