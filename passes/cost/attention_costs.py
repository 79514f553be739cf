"""Costs of attention operators: fused kernels as graphs have them.

A kernel that is told `is_causal` skips the half that no token sees. One that is given a mask does not: it computes all
pairs and adds the mask, whatever window the mask stands for. Formulas over an `Architecture` count a window's pairs
only, so for windowed layers the graph's count is the higher one.
"""

from __future__ import annotations

import torch

from moepass.models import formulas
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
    """query [batch, heads, queries, head_dim], key and value [batch, kv heads, keys, ...]."""
    batch, heads, queries, head_dim = call.shape("query")
    keys, value_dim = call.shape("value")[-2:]
    # PyTorch aligns the causal triangle with the first query and the first key.
    pairs = formulas.causal_pairs(queries, window=keys) if call.arguments.get("is_causal") else queries * keys
    return OpCost(batch * formulas.score_flops(pairs, heads, head_dim, value_dim), call.traffic_bytes)


@op_cost("flex_attention")
def _flex_attention(call: OpCall) -> OpCost:
    """Which blocks its mask leaves out is known when it runs only: all pairs are counted."""
    batch, heads, queries, head_dim = call.shape("0")
    keys, value_dim = call.shape("2")[-2:]
    return OpCost(batch * formulas.score_flops(queries * keys, heads, head_dim, value_dim), call.traffic_bytes)


@op_cost("moepass.trie_attention.default")
def _trie_attention(call: OpCall) -> OpCost:
    """Which tokens share a prefix is known when a step runs only. Counted is one sequence of all its tokens: the most
    that a step without cached prefixes can compute."""
    batch, heads, queries, head_dim = call.shape("query")
    value_dim = call.shape("value")[-1]
    flops = formulas.score_flops(formulas.causal_pairs(queries), heads, head_dim, value_dim)
    return OpCost(batch * flops, call.traffic_bytes)
