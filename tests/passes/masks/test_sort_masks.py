"""Selections by masks of chosen experts become lookups by sorted ids, with the same rows, order and a known size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moepass.passes.graph.nodes import graph_inputs
from moepass.passes.ir.protocol import PassResult
from moepass.passes.masks.sort_masks import sort_masks
from tests.helpers.graphs.compared_models import compare_with_model

EXPERTS, TOP_K = 5, 2
aten = torch.ops.aten
SELECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_select": lambda values, mask: values.masked_select(mask),
    "of a row": lambda values, mask: values[:1].masked_select(mask),
    "boolean index": lambda values, mask: values[mask],
    "nonzero": lambda values, mask: mask.nonzero(),
}
TURNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda mask: mask.t(),
    "contiguous": lambda mask: mask.permute(1, 0).contiguous(),
    "three times": lambda mask: mask.transpose(0, 1).t().t(),
    "also nowhere": lambda mask: torch.ops.aten.transpose.int(mask.t(), 1, -1),
    "also in place": lambda mask: torch.ops.aten.permute.default(mask.t(), [0, -1]),
}


def _mask(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores).int().scatter(1, scores.topk(TOP_K, dim=1)[1], 1).bool()


def _sorted(function: Callable[[torch.Tensor], torch.Tensor], *tokens: int) -> PassResult:
    """Return the result of the pass for `function`, compared with it for each number of tokens."""
    inputs = [(torch.randn(count, EXPERTS, generator=torch.Generator().manual_seed(count)),) for count in tokens]
    return compare_with_model(function, (sort_masks,), inputs, rtol=0)


@pytest.mark.sampled(every=3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_selection_by_chosen_experts_is_a_lookup(selection: str, turn: str) -> None:
    def function(scores: torch.Tensor) -> torch.Tensor:
        return SELECTIONS[selection](TURNS[turn](scores) + 1, TURNS[turn](_mask(scores))) * 2

    result = _sorted(function, 7, 2, 12)
    assert len(result.matches) == 1
    assert not any(node.target in (aten.masked_select.default, aten.nonzero.default) for node in _calls(result))
    (output,) = result.module.graph.output_node().args[0]  # type: ignore[misc]
    symbols = {symbol for node in graph_inputs(result.module.graph) for symbol in _symbols(node.meta["val"])}
    assert _symbols(output.meta["val"]) <= symbols  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores: scores > 0,
        lambda scores: torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=0)[1][:, :2] % EXPERTS, 1).bool(),
        lambda scores: torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1)[1] // 2, 1).bool(),
        lambda scores: torch.ones_like(scores).scatter(1, scores.topk(TOP_K, dim=1)[1], 1).bool(),
        lambda scores: torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1)[1][:4], 1).bool(),
        lambda scores: torch.zeros_like(scores).scatter(1, scores.sort(dim=1)[1][:, :TOP_K], 1).bool(),
    ],
    ids=["any number", "along tokens", "twice the same", "ones elsewhere", "some tokens", "of a sort"],
)
def test_masks_with_a_data_dependent_number_of_ones_are_unchanged(mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = _sorted(lambda scores: scores.t().masked_select(mask(scores).t()), 7, 12)
    assert result.matches == ()


def test_selections_token_by_token_are_unchanged() -> None:
    """No known model selects pairs from a mask [tokens, experts]."""
    assert _sorted(lambda scores: scores.masked_select(_mask(scores)), 7, 12).matches == ()


def _calls(result: PassResult) -> list[torch.fx.Node]:
    return [node for node in result.module.graph.nodes if node.op == "call_function"]


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
