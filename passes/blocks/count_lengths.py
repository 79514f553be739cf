"""Replacement of `torch.bincount` by an operator with a fixed result size, if the graph asserts this size.

`bincount(ids, minlength=n)` has n elements, or more if an id is at least n, so the host must wait for the size. A graph
that views the counts as n numbers was captured with an assertion that there are n. Then a `scatter_add` to n zeros has
the same result, and does not support larger ids either.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter, erase_unread, refresh_fake_values
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments

aten = torch.ops.aten


def fix_count_lengths(graph: Graph) -> None:
    """Replace every `bincount` whose length is asserted to be its `minlength`."""
    for node in list(graph.nodes):
        if not is_call(node, aten.bincount.default):
            continue
        arguments = all_arguments(node)
        if arguments.get("weights") is not None or not _has_length(node, arguments["minlength"]):
            continue
        writer = GraphWriter(graph, node)
        with graph.inserting_before(node):
            counts = writer.counts(writer.cast(arguments["self"], torch.int64), arguments["minlength"])
        node.replace_all_uses_with(counts)
        refresh_fake_values(graph, counts)
        erase_unread(graph, node)


def _has_length(node: Node, number: object) -> bool:
    """Return whether the shape environment asserts or knows that `node` has `number` elements."""
    size = fake_value(node).shape[0]
    length = size_expression(size)
    if not isinstance(size, torch.SymInt) or not length.is_Symbol:
        return bool(length == number)
    conditions = size.node.shape_env.deferred_runtime_asserts.get(length, ())
    return any(condition.expr in (sympy.Eq(length, number), sympy.Eq(number, length)) for condition in conditions)
