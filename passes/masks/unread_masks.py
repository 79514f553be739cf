"""Erase selections by masks whose only readers are assertions that their size is at least 0."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import erase_unread
from moepass.passes.graph.nodes import is_call

aten = torch.ops.aten


def erase_unread_masks(graph: Graph) -> None:
    """Erase every `nonzero` that only such assertions read, with these assertions, which always hold."""
    for node in reversed(list(graph.nodes)):
        if not is_call(node, aten.nonzero.default):
            continue
        asserted = [_assertions_of(size) for size in node.users]
        if any(assertions is None for assertions in asserted):
            continue
        for assertion in [assertion for assertions in asserted for assertion in assertions or ()]:
            (compared,) = assertion.all_input_nodes
            graph.erase_node(assertion)
            if not compared.users:
                erase_unread(graph, compared)
        if not asserted:
            erase_unread(graph, node)


def _assertions_of(size: Node) -> list[Node] | None:
    """Return the assertions that `size` is at least 0, or None if it is no size or has other readers."""
    if not is_call(size, aten.sym_size.int):
        return None
    assertions: list[Node] = []
    for compared in size.users:
        is_bound = is_call(compared, operator.ge) and compared.args == (size, 0)
        if not is_bound or not all(is_call(user, aten._assert_scalar.default) for user in compared.users):
            return None
        assertions += compared.users
    return assertions
