"""The layout of all branches' rows together: [rows, features, ..], for any layout of the rows in one branch.

A branch may have its rows anywhere: in [ranks, 1, slots, width] the rows are the product of dimensions 0 and 2. All
branches together have rows in the first dimension, then the dimensions that follow the branch's rows. Dimensions of
size 1 before the last dimension of rows are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.rows.row_layout import Dimension, Layout, Part, size_of


def is_innermost(dimension: Dimension) -> bool:
    """Return whether the dimension holds all rows, or the innermost of their factors."""
    return any(factor.share is not None and all(half == 1 for _, half in factor.share) for factor in dimension)


def rows_dim(layout: Layout) -> int:
    """Return the dimension that holds the innermost factor of the rows."""
    return next(dim for dim, dimension in enumerate(layout.dimensions) if is_innermost(dimension))


def features_behind(layout: Layout) -> list[int]:
    """Return the sizes of the dimensions after the rows. Raises NotThisForm if there are features elsewhere."""
    last = rows_dim(layout)
    front = layout.dimensions[: last + 1]
    is_plain = all(factor.is_rows for dimension in front for factor in dimension)
    if not is_plain or any(layout.has_rows_along(dim) for dim in range(last + 1, len(layout.dimensions))):
        raise NotThisForm("it has features before its rows, or in one dimension with them")
    sizes = [size_of(dimension) for dimension in layout.dimensions[last + 1 :]]
    if not all(size.is_Integer for size in sizes):
        raise NotThisForm("it has a number of features that is only known at run time")
    return list(map(int, sizes))


def dim_in_front(layout: Layout, dim: int) -> int:
    """Return the dimension [rows, features, ..] of a branch's `dim`. Raises NotThisForm unless that is features."""
    last = rows_dim(layout)
    dim %= len(layout.dimensions)
    if dim <= last:
        raise NotThisForm("it works along its rows, or along a dimension before them")
    return dim - last


def shape_in_place(layout: Layout, total: Any) -> list[Any]:
    """Return a branch's shape for `total` rows: the innermost dimension of rows has all, its other ones size 1."""
    return [
        total if is_innermost(dimension) else 1 if any(each.is_rows for each in dimension) else int(size_of(dimension))
        for dimension in layout.dimensions
    ]


def row_parts(layout: Layout) -> list[Part]:
    """Return the factors of the rows, outermost first."""
    factors = [factor for dimension in layout.dimensions for factor in dimension if factor.is_rows]
    return sorted(factors, key=lambda factor: factor.share or ())


def trailing(shape: Sequence[Any], behind: int) -> list[Any]:
    """Return the last `behind` sizes of an operand without rows. Raises NotThisForm unless the others are 1."""
    front = len(shape) - min(len(shape), behind)
    if any(size_expression(size) != 1 for size in shape[:front]):
        raise NotThisForm("it combines rows with a different value for each row")
    return list(shape[front:])
