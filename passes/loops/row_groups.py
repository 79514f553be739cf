"""The rows of all branches: their number, where the rows of each expert end, and the expert of each row."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.loops.known_totals import selected_index
from moepass.passes.loops.pieces import Pieces
from moepass.passes.ops.arguments import all_arguments

aten, prims = torch.ops.aten, torch.ops.prims


@dataclasses.dataclass
class RowGroups:
    """The groups of rows in `pieces`: their `sizes` in rows, equal for even groups, and the sum, a number or a node."""

    pieces: Pieces
    sizes: tuple[sympy.Expr, ...]
    total: Any
    # For even groups: the number of rows in each, and the sizes of their dimensions, as numbers or nodes.
    each: Any = None
    dim_sizes: dict[sympy.Expr, Any] = dataclasses.field(default_factory=dict)
    _ends: Node | None = None

    @classmethod
    def of(cls, pieces: Pieces, piece: Node, dims: Sequence[int], writer: GraphWriter) -> RowGroups:
        """Return the groups of `pieces`; `dims` of the first `piece` are rows. Raises NotThisForm."""
        if pieces.is_even:
            number = len(pieces.sizes)
            dim_sizes = [writer.size(piece, dim) for dim in dims]
            each = functools.reduce(writer.product, dim_sizes)
            sizes = {size_expression(size): size for size in dim_sizes}
            return cls(
                pieces, (sympy.expand(size_expression(each)),) * number, writer.product(each, number), each, sizes
            )
        if all(size.is_Integer for size in pieces.sizes):
            raise NotThisForm(
                f"{named(pieces.source)} is cut into pieces of constant sizes, {list(pieces.sizes)}, so this graph "
                "is valid for one routing only; capture sizes (torch._dynamo.config.capture_scalar_outputs = True)"
            )
        return cls(pieces, pieces.sizes, _total(pieces, writer))

    def are_equal(self, size: Any, new_size: Any) -> bool:
        """Return whether a captured `size` is equal to `new_size`, which is computed from the rows of all branches."""
        sizes = [sympy.expand(size_expression(each)) for each in (size, new_size)]
        # The sizes of complete pieces add up to the number of all rows, even if torch does not know it.
        is_sum = self.pieces.are_complete and sizes == [self.pieces.total, sympy.expand(size_expression(self.total))]
        return is_sum or sizes[0] == sizes[1]

    def size_as_value(self, size: sympy.Expr) -> Any:
        """Return `size` as a number or a node. Raises NotThisForm if it is no size of an even group."""
        if size.is_Integer:
            return int(size)
        if size in self.dim_sizes:
            return self.dim_sizes[size]
        raise NotThisForm(f"its rows are split into {size}, a number that is known only at run time")

    @property
    def is_even(self) -> bool:
        return self.pieces.is_even

    @property
    def device(self) -> torch.device:
        return fake_value(self.pieces.source).device  # type: ignore[no-any-return]

    def fit(self, pieces: Pieces, rows: sympy.Expr) -> bool:
        """Return whether `pieces` of another tensor have the same numbers of rows."""
        if self.is_even != pieces.is_even or len(pieces.sizes) != len(self.sizes):
            return False
        return rows == self.sizes[0] and (self.is_even or pieces.sizes == self.sizes)

    def all_rows(self, pieces: Pieces, shape: Sequence[Any], writer: GraphWriter) -> Node:
        """Return the rows of all pieces, in this `shape`."""
        source, dim = pieces.source, pieces.dim
        if not self.is_even:
            rows = source
            if not pieces.are_complete and size_expression(fake_value(source).shape[dim]) != pieces.total:
                rows = writer.emit(aten.slice.Tensor, source, dim, 0, self.total)
            return writer.viewed(rows, shape)
        value = fake_value(source)
        dims = list(range(value.dim()))
        if pieces.keeps_dim:
            # [.., experts · n, ..] -> [.., experts, n, ..]
            split = [writer.size(source, each) for each in dims]
            split[dim : dim + 1] = [len(pieces.sizes), int(pieces.sizes[0])]
            source = writer.viewed(source, split)
            dims = list(range(value.dim() + 1))
        if dim != 0:
            source = writer.emit(aten.permute.default, source, [dim, *(each for each in dims if each != dim)])
        return writer.viewed(source, shape)

    def ends(self, writer: GraphWriter) -> Node:
        """Return the indices at which the rows of each expert end, int32 [experts]."""
        if self._ends is None:
            self._ends = self._write_ends(writer)
        return self._ends

    def _write_ends(self, writer: GraphWriter) -> Node:
        pieces = self.pieces
        if self.is_even:
            return writer.ends_of_even_groups(len(self.sizes), self.each, self.device)
        if pieces.table is not None:
            return writer.cast(pieces.table, torch.int32)
        return writer.emit(aten.cumsum.default, self._row_counts(writer), 0, dtype=torch.int32)

    def _row_counts(self, writer: GraphWriter) -> Node:
        """Return the number of rows of each expert, [experts]."""
        counts = _table_of(self.pieces.counts or (), writer)
        if counts is None and self.pieces.counts:
            each = [writer.full([1], count, self.device) for count in self.pieces.counts]
            counts = writer.emit(aten.cat.default, each)
        if counts is not None:
            is_here = fake_value(counts).device == self.device
            return counts if is_here else writer.emit(prims.device_put.default, counts, self.device)
        ends = self.ends(writer)
        zero = writer.full([1], 0, self.device, torch.int32)
        starts = writer.emit(aten.cat.default, [zero, writer.emit(aten.slice.Tensor, ends, 0, 0, len(self.sizes) - 1)])
        return writer.emit(aten.sub.Tensor, ends, starts)

    def expert_of_each_row(self, writer: GraphWriter) -> Node:
        """Return the expert of each row, int64 [rows]."""
        if self.is_even:
            return writer.group_of_each_row(len(self.sizes), self.each, self.device)
        return writer.emit(aten.repeat_interleave.Tensor, self._row_counts(writer), output_size=self.total)


def _total(pieces: Pieces, writer: GraphWriter) -> Any:
    """Return the sum of the sizes of `pieces`, which is the size of their source if that is equal."""
    if pieces.are_complete or size_expression(fake_value(pieces.source).shape[pieces.dim]) == pieces.total:
        return writer.size(pieces.source, pieces.dim)
    total, *counts = pieces.counts or ()
    for count in counts:
        total = writer.emit(operator.add, total, count)
    return total


def _table_of(sizes: Sequence[Any], writer: GraphWriter) -> Node | None:
    """Return the tensor [experts] of which `sizes` are host reads, one by one, or None."""
    if not sizes or not all(is_call(size, aten._local_scalar_dense.default) for size in sizes):
        return None
    sources = [size.args[0] for size in sizes]
    if not all(is_call(source, aten.select.int) for source in sources):
        return None
    table, first = all_arguments(sources[0])["self"], selected_index(sources[0])
    value = fake_value(table)
    in_order = [*map(selected_index, sources)] == list(range(first, first + len(sources))) and first >= 0
    have_one_table = all(source.args[0] is table for source in sources)
    if value.dim() != 1 or value.is_floating_point() or not in_order or not have_one_table:
        return None
    if first == 0 and size_expression(value.shape[0]) == len(sources):
        return table  # type: ignore[no-any-return]
    return writer.emit(aten.slice.Tensor, table, 0, first, first + len(sources))
