"""Assign the nodes of a graph to parts of a model: attention, a router, experts, the head.

Module names do not count. The part follows from the computation of a node and from the use of its result.

    anchors    every GEMM, attention operator, selection of experts (top-k) and lookup in a table of embeddings
    up         of a node: the kinds of the nearest anchors on the paths to its inputs
    down       of a node: the kinds and parts of the nearest anchors on the paths to its users

Pseudo-code
    in host order, with `up`:
        GEMMs of a block, and grouped GEMMs: experts
        attention operators, GEMMs of two values that are not weights: attention
            right after a selection of experts: the router, which dispatches or combines tokens by such a GEMM
    against host order, with `down`:
        a selection on the path to experts, or to masks for their computation: the router
        a GEMM with weights: attention, if it is next to attention or feeds only GEMMs of attention
            the router, if experts are selected by its results
            the head, if it alone leads to the graph's output
            dense otherwise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import fake_value, is_call, is_float
from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.ir.plan import MoEBlock
from moepass.passes.ir.segment import ATTENTION, DENSE, EMBEDDING, EXPERTS, HEAD, ROUTER
from moepass.passes.ir.slot_operations import BANK_TENSOR, EXPERT_STACK, acquire, gather
from moepass.passes.ops.traits import Trait, has_trait, is_pointwise, is_view
from moepass.passes.ops.walk import descendants

aten = torch.ops.aten

_WITH_WEIGHTS = (Trait.MATMUL, Trait.CONVOLUTION)
# Kinds of anchors that are no part of a model by themselves.
_SCORES, _CHOICE, _WEIGHT_GEMM, _OUTPUT = "scores", "choice", "GEMM with weights", "output"


def parts_of_nodes(graph: Graph, blocks: Sequence[MoEBlock] = ()) -> dict[Node, str]:
    """Return the part of the model to which each anchor of `graph` belongs. `blocks` are the graph's MoE blocks."""
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
    """Return parameters, constants and tensors of banks, and values computed from these alone without a GEMM."""
    weights: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            is_weight = not node.meta.get(ARGUMENT_KEY, False)
        elif has_trait(node, Trait.LOOKUP):
            is_weight = inputs[0] in weights  # for example, the weights of some experts
        else:
            passes_on = is_view(node) or is_pointwise(node) or has_trait(node, Trait.CAST, Trait.COPY)
            is_made = passes_on and bool(inputs) and all(used in weights for used in inputs)
            is_weight = is_made or is_call(node, BANK_TENSOR, EXPERT_STACK, gather, acquire)
        if is_weight:
            weights.add(node)
    return weights


def _kinds(graph: Graph, weights: set[Node], expert_gemms: set[str]) -> tuple[dict[Node, str], dict[Node, set[str]]]:
    """Return the kinds of the anchors, and `up` of every node."""
    kinds: dict[Node, str] = {}
    up: dict[Node, set[str]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        up[node] = set[str]().union(*({kinds[used]} if used in kinds else up[used] for used in inputs))
        if node.op == "output":
            kinds[node] = _OUTPUT
        elif node.name in expert_gemms or is_grouped_gemm(node):
            kinds[node] = EXPERTS
        elif has_trait(node, Trait.ATTENTION):
            kinds[node] = _SCORES
        elif is_call(node, aten.topk.default, aten.argmax.default, aten.max.dim):
            kinds[node] = _CHOICE
        elif is_call(node, aten.embedding.default):
            kinds[node] = EMBEDDING
        elif has_trait(node, *_WITH_WEIGHTS) and any(used in weights for used in inputs):
            kinds[node] = _WEIGHT_GEMM
        elif has_trait(node, *_WITH_WEIGHTS):
            is_dispatch = up[node] & {_CHOICE, ROUTER} and _SCORES not in up[node]
            kinds[node] = ROUTER if is_dispatch else _SCORES
    return kinds, up


def _met_at(
    user: Node, kinds: Mapping[Node, str], parts: Mapping[Node, str], down: Mapping[Node, set[str]]
) -> set[str]:
    """Return the part of the anchor `user`, and its kind if it adds information; for other nodes, `down` of `user`."""
    kind = kinds.get(user)
    if kind is None or (kind == _CHOICE and user not in parts):
        return down[user]
    return {parts[user]} if kind == _WEIGHT_GEMM else {kind, parts.get(user, kind)}


def _is_alone(gemm: Node, weights: set[Node]) -> bool:
    """Return whether everything after `gemm` depends only on its results, weights, indices and masks."""
    reached = set(descendants(gemm, follow=lambda user: user.op != "output"))
    further_inputs = {used for node in reached - {gemm} for used in node.all_input_nodes} - reached - weights
    return not any(map(is_float, further_inputs))
