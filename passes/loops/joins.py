"""Where the branches of a loop over experts come together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.node_arguments import all_arguments
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.loops.branches import RowsOfAll
from moepass.passes.loops.row_groups import RowGroups
from moepass.passes.loops.rows_in_front import natural_order, shape_in_place
from moepass.passes.rows.row_layout import size_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Join:
    """`node` puts `branches` side by side along `dim`, a new one where it `stacks` them."""

    node: Node
    branches: tuple[Node, ...]
    dim: int
    stacks: bool


def joins(graph: Graph) -> Iterator[Join]:
    """Every place of `graph` where several values, or one, are put side by side."""
    for node in list(graph.nodes):
        if is_call(node, aten.cat.default, aten.stack.default):
            given = all_arguments(node)
            branches = tuple(given["tensors"])
            dims = fake_value(branches[0]).dim() + is_call(node, aten.stack.default)
            if all(fake_value(one).dim() == fake_value(branches[0]).dim() for one in branches):
                yield Join(node, branches, given["dim"] % dims, is_call(node, aten.stack.default))


def joined(join: Join, rows: RowsOfAll, groups: RowGroups, writer: GraphWriter) -> Node:
    """What `join` gives, from the rows of all branches. Raises NotThisForm."""
    layout = rows.layout
    for dimension in layout.dimensions:
        if any(part.is_rows for part in dimension) and len(dimension) != 1:
            raise NotThisForm(f"{named(join.node)} is given rows and features in one dimension")
    if not groups.is_even:
        of_rows = [dim for dim in range(len(layout.dimensions)) if layout.has_rows_along(dim)]
        if join.stacks or of_rows != [join.dim]:
            raise NotThisForm(f"{named(join.node)} puts experts with different numbers of rows side by side")
        return writer.viewed(rows.node, shape_in_place(layout, groups.total))
    shape = [groups.part(size_of(dimension)) for dimension in layout.dimensions]
    sizes = [*map(groups.part, natural_order(layout))]
    # [experts, parts of rows, outermost first, features ..] -> [experts, dimensions of a branch ..]
    shares = [dimension[0].share for dimension in layout.dimensions if dimension and dimension[0].is_rows]
    order = sorted(range(len(shares)), key=lambda place: shares[place] or ())
    features = [size for size, dimension in zip(shape, layout.dimensions, strict=True) if not _has_rows(dimension)]
    # Rows are the outermost in memory: dimensions of one element in front of them do not matter.
    flat = writer.viewed(rows.node, [len(join.branches), *sizes, *features])
    places: list[int] = []
    row, feature = iter(_inverse(order)), iter(range(len(sizes), len(sizes) + len(features)))
    for dimension in layout.dimensions:
        places.append(1 + (next(row) if _has_rows(dimension) else next(feature)))
    dim = join.dim
    places.insert(dim, 0)
    value = flat
    if places != sorted(places):
        value = writer.emit(aten.permute.default, value, places)
        # What follows was captured for values that lie as they are joined.
        value = writer.emit(aten.clone.default, value, memory_format=torch.contiguous_format)
    if not join.stacks:
        value = writer.viewed(value, [*shape[:dim], writer.product(shape[dim], len(join.branches)), *shape[dim + 1 :]])
    return value


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _has_rows(dimension: Any) -> bool:
    return any(part.is_rows for part in dimension)
