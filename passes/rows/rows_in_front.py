"""Rows in front: the shape in which the rows of all branches are computed, whatever shape those of a branch have.

A branch may have its rows anywhere: [ranks, 1, slots, width] has rows of two parts in dimensions 0 and 2. All branches
together are [rows, width]: rows in the first dimension, and behind it the dimensions that stand behind the rows of a
branch. Dimensions of one element in front of these are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.rows.row_layout import Dimension, Layout, Part, size_of


def is_innermost(dimension: Dimension) -> bool:
    """True where a dimension holds the rows, or the innermost of the parts that they were taken apart into."""
    return any(part.share is not None and all(place == 1 for _, place in part.share) for part in dimension)


def rows_dim(layout: Layout) -> int:
    """The dimension that the rows of a branch end in."""
    return next(dim for dim, dimension in enumerate(layout.dimensions) if is_innermost(dimension))


def features_behind(layout: Layout) -> list[int]:
    """The sizes of the dimensions behind the rows. Raises NotThisForm where features stand elsewhere."""
    place = rows_dim(layout)
    front = layout.dimensions[: place + 1]
    is_plain = all(part.is_rows for dimension in front for part in dimension)
    if not is_plain or any(layout.has_rows_along(dim) for dim in range(place + 1, len(layout.dimensions))):
        raise NotThisForm("it has features in front of its rows, or in one dimension with them")
    sizes = [size_of(dimension) for dimension in layout.dimensions[place + 1 :]]
    if not all(size.is_Integer for size in sizes):
        raise NotThisForm("it has a number of features that only a run tells")
    return list(map(int, sizes))


def dim_in_front(layout: Layout, dim: int) -> int:
    """Where dimension `dim` of a branch is when rows are in front. Raises NotThisForm where it is not there."""
    place = rows_dim(layout)
    dim %= len(layout.dimensions)
    if dim <= place:
        raise NotThisForm("it works along its rows, or in front of them")
    return dim - place


def shape_in_place(layout: Layout, total: Any) -> list[Any]:
    """The shape of `total` rows where those of a branch lie: the innermost part is all of them, others are one."""
    return [
        total if is_innermost(dimension) else 1 if any(part.is_rows for part in dimension) else int(size_of(dimension))
        for dimension in layout.dimensions
    ]


def row_parts(layout: Layout) -> list[Part]:
    """The parts that rows were taken apart into, the outermost first."""
    parts = [part for dimension in layout.dimensions for part in dimension if part.is_rows]
    return sorted(parts, key=lambda part: part.share or ())


def trailing(shape: Sequence[Any], behind: int) -> list[Any]:
    """The last `behind` sizes of something that rows meet. Raises NotThisForm where others are more than one."""
    front = len(shape) - min(len(shape), behind)
    if any(size_expression(size) != 1 for size in shape[:front]):
        raise NotThisForm("it meets rows with another value for each of them")
    return list(shape[front:])
