"""The pass: regions stand side by side, what needs all tokens stands between them; a graph without one says why."""

from __future__ import annotations

import itertools

import torch
from token_models import TokenModel, hybrid, regions, token_model

from moepass.passes.ir.segment import REGION_KEY


def _running_sum(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.mlp(model.embed(ids))
    return model.mlp(x + x.cumsum(1))


def test_what_needs_all_tokens_stands_between_regions() -> None:
    module = hybrid(*token_model(_running_sum)).module
    module.graph.lint()
    found = regions(module)
    assert list(found) == [0, 1]
    assert "embedding.default" in found[0]
    assert not any(operator.startswith("cumsum") for operators in found.values() for operator in operators)


def test_the_nodes_of_a_region_stand_side_by_side() -> None:
    module = hybrid(*token_model(_running_sum)).module
    numbers = [node.meta.get(REGION_KEY) for node in module.graph.nodes if node.op == "call_function"]
    assert [number for number, _ in itertools.groupby(numbers) if number is not None] == [0, 1]


def _no_tokens_alone(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.embed(ids).cumsum(1)


def test_a_graph_without_a_region_says_why() -> None:
    (refusal,) = hybrid(*token_model(_no_tokens_alone)).refusals
    assert "cumsum" in refusal.reason
