"""Merge views that show the same: a captured loop over views of a written tensor views it anew for every expert."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from moepass.passes.graph.nodes import is_view


def merge_equal_views(graph: Graph) -> None:
    """Let the readers of each view read the first equal one. Both show one memory, whatever is written to it."""
    first: dict[tuple[Any, ...], Node] = {}
    for node in list(graph.nodes):
        if is_view(node):
            # As text: lists cannot be looked up. Names tell nodes apart.
            key = (node.target, str(node.args), str(sorted(node.kwargs.items())))
            other = first.setdefault(key, node)
            if other is not node:
                node.replace_all_uses_with(other)
                graph.erase_node(node)
