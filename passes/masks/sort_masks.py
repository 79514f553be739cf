"""Select by sorted expert ids what a mask of chosen experts selects: its size is known before a run.

A router's choice may be written as a mask [experts, tokens], and pairs of an expert and a token taken from it by
`masked_select`, `nonzero` or a boolean index. How many these are, only a run tells, and the host waits for it. Where
the mask was made from k different experts of each token, they are tokens · k, and their order is that of a stable sort.

Contract
    in    a captured graph
    out   the same graph, where every selection by such a mask is a lookup; exact. The graph as it came, and a refusal,
          where what reads a selection takes no other size

Pseudo-code
    for each selection by a mask:
        follow the mask to the transpose of `zeros.scatter(1, ids, 1)`, and ids to a top-k
        list pairs sorted by expert, for each expert by token
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

aten, prims = torch.ops.aten, torch.ops.prims


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
        except Exception as error:  # whatever an operator says to a size that it was not captured for
            reason = f"what reads the selection has a size that does not follow from it ({first_line(error)})"
            refusal = refused(node, reason, place_of(node))
            plan = dataclasses.replace(plan, refusals=(*plan.refusals, refusal))
            return PassResult(module, plan, refusals=(refusal,))
        erase_unread(graph, node)
    graph.lint()
    sorted_module.recompile()
    return PassResult(sorted_module, plan, tuple(matches))


def _selected_by(node: Node) -> Mask | None:
    """The mask [experts, tokens] that `node` selects by; None where it is none, or not one of experts."""
    if not is_call(node, aten.masked_select.default, aten.nonzero.default, aten.index.Tensor):
        return None
    given = all_arguments(node)
    if is_call(node, aten.index.Tensor):
        mask = given["indices"][0]
        if len(given["indices"]) != 1 or mask is None or fake_value(mask).dtype is not torch.bool:
            return None
    else:
        mask = given["mask"] if is_call(node, aten.masked_select.default) else given["self"]
    found = chosen_experts(mask)
    return found if found is not None and found.is_by_expert else None


def _pairs(mask: Mask, writer: GraphWriter) -> tuple[Node, Node]:
    """Row and column in the mask of each pair, both [tokens · k], in the order in which the mask is read."""
    ids = mask.ids
    if fake_value(ids).dtype is not torch.int64:
        ids = writer.emit(prims.convert_element_type.default, ids, torch.int64)
    k = int(fake_value(ids).shape[1])
    count = writer.product(writer.size(ids, 0), k)
    both = writer.emit(aten.sort.stable, writer.viewed(ids, [count]), stable=True)
    expert, pair = writer.getitem(both, 0), writer.getitem(both, 1)
    return expert, writer.emit(aten.div.Tensor_mode, pair, k, rounding_mode="floor")


def _selected(node: Node, pairs: tuple[Node, Node], writer: GraphWriter) -> Node:
    row, column = pairs
    if is_call(node, aten.nonzero.default):
        columns = [writer.emit(aten.unsqueeze.default, one, 1) for one in pairs]
        return writer.emit(aten.cat.default, columns, 1)
    given: dict[str, Any] = all_arguments(node)
    source = given["self"]
    mask = given["mask"] if "mask" in given else given["indices"][0]
    shape = fake_value(mask).shape
    if "mask" in given and str(fake_value(source).shape) != str(shape):
        source = writer.emit(aten.expand.default, source, [writer.size(mask, 0), writer.size(mask, 1)])
    return writer.emit(aten.index.Tensor, source, [row, column])
