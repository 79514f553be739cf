"""Counts by `torch.bincount` of a length that a graph asserts: written with that length, so that nothing has to wait.

`bincount(ids, minlength=n)` has n elements, or more where an id is n or larger, which only a run tells. A graph that
views the counts as n numbers has been captured with an assertion that there are n. Then they are those of a
`scatter_add` into n zeros, which takes no id beyond them either.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter, erase_unread, refresh_fake_values
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.ops.arguments import all_arguments

aten, prims = torch.ops.aten, torch.ops.prims


def fix_count_lengths(graph: Graph) -> None:
    """Replace every `bincount` whose length is asserted to be its `minlength`."""
    for node in list(graph.nodes):
        if not is_call(node, aten.bincount.default):
            continue
        given = all_arguments(node)
        if given.get("weights") is not None or not _has_length(node, given["minlength"]):
            continue
        writer = GraphWriter(graph, node)
        with graph.inserting_before(node):
            counts = _counted(given["self"], given["minlength"], writer)
        node.replace_all_uses_with(counts)
        refresh_fake_values(graph, counts)
        erase_unread(graph, node)


def _has_length(node: Node, number: object) -> bool:
    """True where the shape environment has it that the counts `node` are so many."""
    size = fake_value(node).shape[0]
    known = size_expression(size)
    if not isinstance(size, torch.SymInt) or not known.is_Symbol:
        return bool(known == number)  # that the symbol is this number is known already
    conditions = size.node.shape_env.deferred_runtime_asserts.get(known, ())
    return any(condition.expr in (sympy.Eq(known, number), sympy.Eq(number, known)) for condition in conditions)


def _counted(ids: Node, number: int, writer: GraphWriter) -> Node:
    if fake_value(ids).dtype is not torch.int64:
        ids = writer.emit(prims.convert_element_type.default, ids, torch.int64)
    like = {"dtype": torch.int64, "device": fake_value(ids).device}
    ones = writer.emit(aten.full.default, [writer.size(ids, 0)], 1, **like)
    return writer.emit(aten.scatter_add.default, writer.emit(aten.full.default, [number], 0, **like), 0, ids, ones)
