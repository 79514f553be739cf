"""Nodes that join the branches of a loop over experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import refuse
from moepass.passes.loops.branches import RowsOfAll
from moepass.passes.loops.row_groups import RowGroups
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.rows.row_layout import Dimension, size_of
from moepass.passes.rows.rows_in_front import row_parts, shape_in_place

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Join:
    """`node` concatenates `branches` along `dim`, or `stacks` them along a new `dim`."""

    node: Node
    branches: tuple[Node, ...]
    dim: int
    stacks: bool


def joins(graph: Graph) -> Iterator[Join]:
    """Yield every node of `graph` that concatenates or stacks values."""
    for node in list(graph.nodes):
        if is_call(node, aten.cat.default, aten.stack.default):
            arguments = all_arguments(node)
            branches, stacks = tuple(arguments["tensors"]), is_call(node, aten.stack.default)
            dims = fake_value(branches[0]).dim() + stacks
            if all(fake_value(branch).dim() == fake_value(branches[0]).dim() for branch in branches):
                yield Join(node, branches, arguments["dim"] % dims, stacks)


def joined(join: Join, rows: RowsOfAll, groups: RowGroups, writer: GraphWriter) -> Node:
    """Return the result of `join`, computed from the rows of all branches. Raises NotThisForm."""
    layout = rows.layout
    for dimension in layout.dimensions:
        if any(row_dim.is_rows for row_dim in dimension) and len(dimension) != 1:
            refuse(join.node, "has operands with rows and features in one dimension")
    if not groups.is_even:
        row_axes = [dim for dim in range(len(layout.dimensions)) if layout.has_rows_along(dim)]
        if join.stacks or row_axes != [join.dim]:
            refuse(join.node, "combines different numbers of rows; expected torch.cat of rows")
        return writer.viewed(rows.node, shape_in_place(layout, groups.total))
    shape = [groups.size_as_value(size_of(dimension)) for dimension in layout.dimensions]
    row_dims = row_parts(layout)
    features = [size for size, dimension in zip(shape, layout.dimensions, strict=True) if not _has_rows(dimension)]
    # [experts, parts of rows, outermost first, features ..] -> [experts, dimensions of a branch ..]
    sizes = [groups.size_as_value(row_dim.size) for row_dim in row_dims]
    value = writer.viewed(rows.node, [len(join.branches), *sizes, *features])
    later = itertools.count(1 + len(row_dims))
    order = [
        1 + row_dims.index(dimension[0]) if _has_rows(dimension) else next(later) for dimension in layout.dimensions
    ]
    dim = join.dim
    order.insert(dim, 0)
    if order != sorted(order):
        value = writer.emit(aten.permute.default, value, order)
        # Later nodes were captured for a contiguous result.
        value = writer.emit(aten.clone.default, value, memory_format=torch.contiguous_format)
    if not join.stacks:
        value = writer.viewed(value, [*shape[:dim], writer.product(shape[dim], len(join.branches)), *shape[dim + 1 :]])
    return value


def _has_rows(dimension: Dimension) -> bool:
    return any(factor.is_rows for factor in dimension)
