"""Tell which part of a model the nodes of a graph belong to: attention, a router, experts, the head.

Names of modules say nothing here; what a node computes, and what its result goes into, does.

    anchors    every GEMM, attention operator, choice of experts (top-k) and lookup in a table of embeddings
    up         of a node: the kinds of the anchors that are met first on the ways back from it
    down       of a node: the kinds and parts of the anchors that are met first on the ways on from it

Pseudo-code
    in host order, with `up`:
        GEMMs of a block, and grouped GEMMs: experts
        attention operators, GEMMs of two values that are no weights: attention
            right after a choice of experts: the router, which dispatches or combines tokens by such a GEMM
    against host order, with `down`:
        a choice on the way to experts, or to masks for what computes them: the router
        a GEMM with weights: attention, where it is next to attention or feeds nothing but GEMMs of attention
            the router, where the experts are chosen by its results
            the head, where it alone leads to the graph's output
            dense otherwise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import fake_value, is_call, is_view
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import MoEBlock
from moepass.passes.ir.segment import ATTENTION, DENSE, EMBEDDING, EXPERTS, HEAD, ROUTER
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, acquire, gather

aten = torch.ops.aten

_WITH_WEIGHTS = (
    *(aten.mm.default, aten.addmm.default, aten._addmm_activation.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.linear.default, aten.mv.default, aten._scaled_mm.default, aten._int_mm.default),
    aten.convolution.default,
)
_ATTENTION = (
    *(aten.scaled_dot_product_attention.default, aten._scaled_dot_product_attention_math.default),
    *(aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_efficient_attention.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
# They may not be loaded.
_ATTENTION_BY_NAME = ("flex_attention", "moepass.trie_attention")
_CHOICES = (aten.topk.default, aten.argmax.default, aten.max.dim)
_COPIES = (aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default)
_LOOKUPS = (aten.index.Tensor, aten.index_select.default)
# Kinds of anchors that are no part of a model by themselves.
_SCORES, _CHOICE, _WEIGHT_GEMM, _OUTPUT = "scores", "choice", "GEMM with weights", "output"


def parts_of_nodes(graph: Graph, blocks: Sequence[MoEBlock] = ()) -> dict[Node, str]:
    """The part of the model that each anchor of `graph` belongs to; `blocks` are those that were found in it."""
    weights = _weights(graph)
    kinds, up = _kinds(graph, weights, {name for block in blocks for name in block.gemms})
    experts = {block.experts for block in blocks}
    parts: dict[Node, str] = {}
    down: dict[Node, set[str]] = {}
    for node in reversed(graph.nodes):
        down[node] = set[str]().union(*(_met_at(user, kinds, parts, down) for user in node.users))
        kind = kinds.get(node)
        if kind == _SCORES:
            parts[node] = ATTENTION
        elif kind == _CHOICE:
            if EXPERTS in down[node] or (_SCORES not in down[node] and down[node] - {_OUTPUT}):
                parts[node] = ROUTER
        elif kind == _WEIGHT_GEMM:
            width = fake_value(node).shape[-1]
            scores_experts = not experts or (isinstance(width, int) and width in experts)
            if _SCORES in up[node] | down[node] or down[node] == {ATTENTION}:
                parts[node] = ATTENTION
            elif ROUTER in down[node] and _CHOICE in down[node] and scores_experts:
                parts[node] = ROUTER
            else:
                parts[node] = HEAD if down[node] == {_OUTPUT} and _is_alone(node, weights) else DENSE
        elif kind is not None and kind != _OUTPUT:
            parts[node] = kind
    return parts


def _weights(graph: Graph) -> set[Node]:
    """Parameters, constants and tensors of banks, and what is made of such alone without a GEMM."""
    weights: set[Node] = set()
    for node in graph.nodes:
        given = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            is_weight = not node.meta.get(ARGUMENT_KEY, False)
        elif is_call(node, *_LOOKUPS):
            is_weight = given[0] in weights  # the weights of some experts, say
        else:
            is_pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
            passes_on = is_view(node) or is_pointwise or is_call(node, *_COPIES)
            is_made = passes_on and bool(given) and all(used in weights for used in given)
            is_weight = is_made or is_call(node, BANK_TENSOR, EXPERT_STACK, gather, acquire)
        if is_weight:
            weights.add(node)
    return weights


def _kinds(graph: Graph, weights: set[Node], expert_gemms: set[str]) -> tuple[dict[Node, str], dict[Node, set[str]]]:
    """The kinds of the anchors, and `up` of every node."""
    kinds: dict[Node, str] = {}
    up: dict[Node, set[str]] = {}
    for node in graph.nodes:
        given = node.all_input_nodes
        up[node] = set[str]().union(*({kinds[used]} if used in kinds else up[used] for used in given))
        if node.op == "output":
            kinds[node] = _OUTPUT
        elif node.name in expert_gemms or is_grouped_gemm(node):
            kinds[node] = EXPERTS
        elif is_call(node, *_ATTENTION) or any(name in str(node.target) for name in _ATTENTION_BY_NAME):
            kinds[node] = _SCORES
        elif is_call(node, *_CHOICES):
            kinds[node] = _CHOICE
        elif is_call(node, aten.embedding.default):
            kinds[node] = EMBEDDING
        elif is_call(node, *_WITH_WEIGHTS) and any(used in weights for used in given):
            kinds[node] = _WEIGHT_GEMM
        elif is_call(node, *_WITH_WEIGHTS):
            is_dispatch = up[node] & {_CHOICE, ROUTER} and _SCORES not in up[node]
            kinds[node] = ROUTER if is_dispatch else _SCORES
    return kinds, up


def _met_at(
    user: Node, kinds: Mapping[Node, str], parts: Mapping[Node, str], down: Mapping[Node, set[str]]
) -> set[str]:
    """What a way down meets first at `user`: its part, which is known by then, and its kind where that says more."""
    kind = kinds.get(user)
    if kind is None or (kind == _CHOICE and user not in parts):
        return down[user]
    return {parts[user]} if kind == _WEIGHT_GEMM else {kind, parts.get(user, kind)}


def _is_alone(gemm: Node, weights: set[Node]) -> bool:
    """True where all that follows `gemm` is computed from its results, weights, indices and masks."""
    reached, pending = {gemm}, [gemm]
    while pending:
        new = [user for user in pending.pop().users if user not in reached and user.op != "output"]
        reached.update(new)
        pending.extend(new)
    others = {used for node in reached - {gemm} for used in node.all_input_nodes} - reached - weights
    values = [fake_value(node) for node in others]
    return not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
