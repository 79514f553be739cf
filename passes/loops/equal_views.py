"""Merge equal views, and equal computations on parameters: a captured loop over experts has one for every expert.

Slices of all elements are removed: Python's `ids[:, 0]` is captured with one.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.weight_recipe import RECIPE_OPERATIONS
from moepass.passes.masks.chosen_rows import is_full_slice
from moepass.passes.ops.traits import base_operation, is_aten, is_view


def merge_equal_views(graph: Graph) -> None:
    """Replace each view, and each value computed from parameters, by the first equal one.

    Equal views share memory, so they stay equal after writes. Parameters that the graph writes to do not count.
    """
    first: dict[tuple[Any, ...], Node] = {}
    written = writes_to_inputs(graph)
    fixed: set[Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.meta.get(ARGUMENT_KEY, False) and node not in written:
            fixed.add(node)
        if is_full_slice(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        is_weight = _is_computed_from(node, fixed)
        if is_view(node) or is_weight:
            # The arguments are text, because lists have no hash; in it, nodes are unique names.
            key = (node.target, str(node.args), str(sorted(node.kwargs.items())))
            equal = first.setdefault(key, node)
            if equal is not node:
                node.replace_all_uses_with(equal)
                graph.erase_node(node)
            elif is_weight:
                fixed.add(node)


def _is_computed_from(node: Node, fixed: set[Node]) -> bool:
    read = node.all_input_nodes
    is_step = is_aten(node.target) and base_operation(node) in RECIPE_OPERATIONS
    return is_step and bool(read) and all(used in fixed for used in read)
