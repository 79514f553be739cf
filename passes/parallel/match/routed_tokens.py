"""Number of this rank's tokens that a parallel block routes."""

from __future__ import annotations

import sympy
import torch

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.walk import ancestors
from moepass.passes.parallel.match.near_experts import MOST_NODES
from moepass.passes.parallel.match.parallel_block import ParallelBlock

aten = torch.ops.aten

# Meta key of the gather of a rewritten block: its number of tokens, or the reason why that is unknown.
TOKENS_KEY = "moepass_tokens"


def routed_tokens(block: ParallelBlock) -> sympy.Expr | None:
    """Return the number of this rank's tokens that the block routes, as a size of the graph, or None if unknown."""
    if "ids" in block.sources:
        return size_expression(fake_value(block.sources["ids"]).shape[0])
    for node in ancestors(block.sources.get("counts", block.sources["rows"]), most=MOST_NODES):
        if is_call(node, aten.topk.default):
            *leading, top_k = (size_expression(size) for size in fake_value(node)[0].shape)
            tokens = sympy.Mul(*leading)
            rows = size_expression(fake_value(block.sources["rows"]).shape[0])
            # With a fixed capacity, rows are slots: some may be empty, and some tokens may be dropped.
            is_plausible = block.form == "all_to_all_slots" or sympy.expand(rows - tokens * top_k) == 0
            return tokens if is_plausible else None
    return None
