"""Costs of fused attention kernels as they appear in graphs.

With `is_causal`, a kernel skips the half of the pairs that no token sees. With a mask, it computes all pairs and adds
the mask, even if the mask is a window. Formulas over an `Architecture` count only the pairs of a window, so the graph's
count is higher for windowed layers.
"""

from __future__ import annotations

import torch

from moepass.models.formulas.attention import causal_pairs, score_flops
from moepass.passes.cost.op_costs import OpCall, OpCost, op_cost

aten = torch.ops.aten


@op_cost(
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
def _scaled_dot_product(call: OpCall) -> OpCost:
    """Count pairs of query [batch, heads, queries, head_dim] with key and value [batch, kv heads, keys, ...]."""
    batch, heads, queries, head_dim = call.shape("query")
    keys, value_dim = call.shape("value")[-2:]
    # PyTorch aligns the causal triangle with the first query and the first key.
    pairs = causal_pairs(queries, window=keys) if call.arguments.get("is_causal") else queries * keys
    return OpCost(batch * score_flops(pairs, heads, head_dim, value_dim), call.traffic_bytes)


@op_cost("flex_attention")
def _flex_attention(call: OpCall) -> OpCost:
    """Count all pairs: which blocks the mask skips is known only when it runs."""
    batch, heads, queries, head_dim = call.shape("0")
    keys, value_dim = call.shape("2")[-2:]
    return OpCost(batch * score_flops(queries * keys, heads, head_dim, value_dim), call.traffic_bytes)


@op_cost("moepass.trie_attention.default")
def _trie_attention(call: OpCall) -> OpCost:
    """Count the pairs of one sequence of all tokens, an upper bound for a step without cached prefixes.

    The tokens that share a prefix are known only when a step runs.
    """
    batch, heads, queries, head_dim = call.shape("query")
    value_dim = call.shape("value")[-1]
    flops = score_flops(causal_pairs(queries), heads, head_dim, value_dim)
    return OpCost(batch * flops, call.traffic_bytes)
