"""Erase the selections by masks of which nobody reads more than that their number is not below zero."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import erase_unread
from moepass.passes.graph.nodes import is_call

aten = torch.ops.aten


def erase_unread_masks(graph: Graph) -> None:
    """Erase every `nonzero` that is read by such assertions alone, with these: they hold whatever it selects."""
    for node in reversed(list(graph.nodes)):
        if not is_call(node, aten.nonzero.default):
            continue
        asserted = [_assertions_of(size) for size in node.users]
        if any(found is None for found in asserted):
            continue
        for assertion in [one for found in asserted for one in found or ()]:
            (compared,) = assertion.all_input_nodes
            graph.erase_node(assertion)
            if not compared.users:
                erase_unread(graph, compared)
        if not asserted:
            erase_unread(graph, node)


def _assertions_of(size: Node) -> list[Node] | None:
    """The assertions that `size` is at least 0; None where it is no size, or read by something else."""
    if not is_call(size, aten.sym_size.int):
        return None
    found: list[Node] = []
    for compared in size.users:
        is_bound = is_call(compared, operator.ge) and compared.args == (size, 0)
        if not is_bound or not all(is_call(user, aten._assert_scalar.default) for user in compared.users):
            return None
        found += compared.users
    return found
