"""Nodes of a region are adjacent, operators on all tokens are between regions, and refusals have a reason."""

from __future__ import annotations

import itertools

import torch

from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext
from moepass.passes.ir.segment import REGION_KEY
from moepass.passes.tokens.hybrid_prefill import hybrid_prefill
from moepass.passes.tokens.token_flow import token_inputs
from tests.helpers.graphs.backend_helper import capture
from tests.helpers.graphs.token_models import TokenModel, hybrid, regions, token_model


def _running_sum(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    x = model.mlp(model.embed(ids))
    return model.mlp(x + x.cumsum(1))


def test_operators_on_all_tokens_are_between_regions() -> None:
    module = hybrid(*token_model(_running_sum)).module
    module.graph.lint()
    by_region = regions(module)
    assert list(by_region) == [0, 1]
    assert "embedding.default" in by_region[0]
    assert not any(operator.startswith("cumsum") for operators in by_region.values() for operator in operators)


def test_the_nodes_of_a_region_are_adjacent() -> None:
    module = hybrid(*token_model(_running_sum)).module
    numbers = [node.meta.get(REGION_KEY) for node in module.graph.nodes if node.op == "call_function"]
    assert [number for number, _ in itertools.groupby(numbers) if number is not None] == [0, 1]


def test_sizes_are_computed_before_their_region() -> None:
    """The sizes are read from an input that comes after a tensor with the same sizes."""
    module = capture(*token_model(_running_sum), dynamic=True).module
    graph = module.graph
    ids = next(iter(token_inputs(graph)))
    last = next(node for node in graph.nodes if is_call(node, torch.ops.aten.cumsum.default))
    with graph.inserting_before(last):
        size = graph.call_function(torch.ops.aten.sym_size.int, (ids, 1))
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (last.args[0], size))
    size.meta["val"] = fake_value(ids).shape[1]
    scaled.meta["val"] = fake_value(last)
    last.update_arg(0, scaled)
    written = hybrid_prefill(module, Plan(), PassContext(chunk_tokens=4)).module
    places = [node.meta.get(REGION_KEY) for node in written.graph.nodes if node.op == "call_function"]
    sizes = [is_call(node, torch.ops.aten.sym_size.int) for node in written.graph.nodes if node.op == "call_function"]
    assert sizes.index(True) < places.index(0)


def _no_tokens_alone(model: TokenModel, ids: torch.Tensor) -> torch.Tensor:
    return model.embed(ids).cumsum(1)


def test_a_graph_without_a_region_says_why() -> None:
    (refusal,) = hybrid(*token_model(_no_tokens_alone)).refusals
    assert "cumsum" in refusal.reason
