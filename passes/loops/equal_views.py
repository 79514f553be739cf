"""Merge equal views, and equal computations of parameters: a captured loop over experts has one for every expert.

A slice of everything is no view of its own: Python's `ids[:, 0]` is captured with one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.source_lines import ARGUMENT_KEY
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ir.weight_recipe import RECIPE_OPERATIONS
from moepass.passes.masks.chosen_rows import is_full_slice
from moepass.passes.ops.traits import base_operation, is_view


def merge_equal_views(graph: Graph) -> None:
    """Let the readers of each view, and of what is computed of parameters, read the first equal one.

    Equal views show one memory, whatever is written to it. Parameters that the graph writes to are none here.
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
        is_weight = _is_computed_of(node, fixed)
        if is_view(node) or is_weight:
            # As text: lists cannot be looked up. Names tell nodes apart.
            key = (node.target, str(node.args), str(sorted(node.kwargs.items())))
            other = first.setdefault(key, node)
            if other is not node:
                node.replace_all_uses_with(other)
                graph.erase_node(node)
            elif is_weight:
                fixed.add(node)


def _is_computed_of(node: Node, fixed: set[Node]) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    read = node.all_input_nodes
    return base_operation(node) in RECIPE_OPERATIONS and bool(read) and all(used in fixed for used in read)
