"""Replace selections by a mask of chosen experts by lookups of sorted expert ids, whose number is known before a run.

A model may mark the chosen experts in a mask [experts, tokens], and select pairs of an expert and a token with
`masked_select`, `nonzero` or a boolean index. The host must wait for the number of pairs. If the mask marks k different
experts for each token, there are tokens · k pairs, in the order of a stable sort.

Contract
    in    a captured graph
    out   the same graph with lookups instead of selections by such masks; exact. The unchanged graph with a refusal, if
          a reader of a selection does not accept the new size

Pseudo-code
    for each selection by a mask:
        follow the mask to the transpose of `zeros.scatter(1, ids, 1)`, and ids to a top-k
        list pairs sorted by expert, then by token
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moepass.passes.blocks.expert_gemms import refused
from moepass.passes.blocks.expert_masks import Mask, chosen_experts
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread, refresh_fake_values
from moepass.passes.graph.nodes import copy_graph_module, fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.refusals import first_line
from moepass.passes.graph.source_lines import place_of
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, graph_pass
from moepass.passes.ops.arguments import all_arguments

aten = torch.ops.aten


@graph_pass(conflicts={"blocks"})
def sort_masks(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Replace selections by masks of experts."""
    if not any(_selected_by(node) is not None for node in module.graph.nodes):
        return PassResult(module, plan)
    sorted_module = copy_graph_module(module)
    graph = sorted_module.graph
    pairs: dict[Mask, tuple[Node, Node]] = {}
    matches: list[str] = []
    for node in list(graph.nodes):
        mask = _selected_by(node)
        if mask is None:
            continue
        writer = GraphWriter(graph, node)
        try:
            with graph.inserting_before(node):
                if mask not in pairs:
                    pairs[mask] = _pairs(mask, writer)
                selected = _selected(node, pairs[mask], writer)
        except NotThisForm:
            writer.erase()
            continue
        matches.append(node.name)
        node.replace_all_uses_with(selected)
        try:
            refresh_fake_values(graph, selected)
        except Exception as error:  # operators raise various errors for sizes that they were not captured for
            reason = f"what reads the selection has a size that does not follow from it ({first_line(error)})"
            refusal = refused(node, reason, place_of(node))
            plan = dataclasses.replace(plan, refusals=(*plan.refusals, refusal))
            return PassResult(module, plan, refusals=(refusal,))
        erase_unread(graph, node)
    graph.lint()
    sorted_module.recompile()
    return PassResult(sorted_module, plan, tuple(matches))


def _selected_by(node: Node) -> Mask | None:
    """Return the mask [experts, tokens] of chosen experts by which `node` selects, or None."""
    if not is_call(node, aten.masked_select.default, aten.nonzero.default, aten.index.Tensor):
        return None
    arguments = all_arguments(node)
    if is_call(node, aten.index.Tensor):
        mask = arguments["indices"][0]
        if len(arguments["indices"]) != 1 or mask is None or fake_value(mask).dtype is not torch.bool:
            return None
    else:
        mask = arguments["mask"] if is_call(node, aten.masked_select.default) else arguments["self"]
    expert_mask = chosen_experts(mask)
    return expert_mask if expert_mask is not None and expert_mask.is_by_expert else None


def _pairs(mask: Mask, writer: GraphWriter) -> tuple[Node, Node]:
    """Return row and column of each pair in the mask, both [tokens · k], in row-major order."""
    ids = writer.cast(mask.ids, torch.int64)
    k = int(fake_value(ids).shape[1])
    expert, pair = writer.sort(writer.viewed(ids, [writer.product(writer.size(ids, 0), k)]))
    return expert, writer.emit(aten.div.Tensor_mode, pair, k, rounding_mode="floor")


def _selected(node: Node, pairs: tuple[Node, Node], writer: GraphWriter) -> Node:
    row, column = pairs
    if is_call(node, aten.nonzero.default):
        columns = [writer.emit(aten.unsqueeze.default, index, 1) for index in pairs]
        return writer.emit(aten.cat.default, columns, 1)
    arguments: dict[str, Any] = all_arguments(node)
    source = arguments["self"]
    mask = arguments["mask"] if "mask" in arguments else arguments["indices"][0]
    shape = fake_value(mask).shape
    if "mask" in arguments and str(fake_value(source).shape) != str(shape):
        source = writer.emit(aten.expand.default, source, [writer.size(mask, 0), writer.size(mask, 1)])
    return writer.emit(aten.index.Tensor, source, [row, column])
