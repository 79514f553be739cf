"""Position of the experts' rows in the dimensions of a tensor.

Every dimension is a product of factors, outermost first: all rows, a factor of the rows (for example the experts, if
there are experts · slots rows), or features. A view may join and split factors, as long as every row remains one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sympy

from moepass.passes.graph.input_sizes import size_expression

T = TypeVar("T")
# Which factor of the rows: for each split, the sizes as text, and 0 for the outer or 1 for the inner factor.
Share = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A factor of a dimension: `size` features without `share`; all rows if `share` is (), else a factor of them."""

    size: sympy.Expr
    share: Share | None = None

    @property
    def is_rows(self) -> bool:
        return self.share is not None


Dimension = tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The factors of each dimension of a tensor; without rows the tensor is a constant, equal for all rows."""

    dimensions: tuple[Dimension, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        factors = (factor for dimension in self.dimensions for factor in dimension)
        return tuple(sorted(factor.share for factor in factors if factor.share is not None))

    @property
    def has_rows(self) -> bool:
        return bool(self.shares)

    @property
    def is_by_row(self) -> bool:
        """True if the first dimension is all rows, in order, and the others are features."""
        first = self.dimensions[0] if self.dimensions else ()
        return bool(first) and first[0].share == () and len(first) == 1 and len(self.shares) == 1

    def has_rows_along(self, dim: int) -> bool:
        return any(factor.is_rows for factor in self.dimensions[dim])

    @property
    def of_a_row(self) -> tuple[sympy.Expr, ...]:
        """The shape of one row, which does not show the order of rows and features in one dimension."""
        return tuple(size_of(tuple(each for each in dimension if not each.is_rows)) for dimension in self.dimensions)


def rows_first(shape: Sequence[Any]) -> Layout:
    """Return the layout of a tensor [rows, features, ..]."""
    first, *widths = map(size_expression, shape)
    return Layout(((Part(first, ()),), *map(features, widths)))


def no_rows(shape: Sequence[Any]) -> Layout:
    return Layout(tuple(features(size) for size in shape))


def features(size: Any) -> Dimension:
    size = size_expression(size)
    return () if size == 1 else (Part(size),)


def size_of(dimension: Dimension) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*(factor.size for factor in dimension)))


def features_per_row(dimension: Dimension) -> int | None:
    """Return the size of `dimension` divided by the number of rows, or None if it does not hold all rows."""
    if [factor.share for factor in dimension if factor.is_rows] != [()]:
        return None
    return int(sympy.Mul(*(factor.size for factor in dimension if not factor.is_rows)))


def reshaped(layout: Layout, shape: Sequence[Any]) -> Layout | None:
    """Return the layout after a reshape to `shape`, or None if a row would not remain one row."""
    pending = [factor for dimension in layout.dimensions for factor in dimension]
    sizes = list(map(size_expression, shape))
    dimensions = []
    for dim, size in enumerate(sizes):
        taken = _take_none(pending, sizes[dim + 1 :]) if size == 0 else _take(pending, size)
        if taken is None:
            return None
        dimensions.append(_joined(taken))
    if pending and dimensions and all(factor.size == 1 for factor in pending):
        dimensions[-1] += tuple(pending)  # a single row
        pending = []
    return None if pending else Layout(tuple(dimensions))


def _take_none(pending: list[Part], after: Sequence[sympy.Expr]) -> Dimension | None:
    """Remove the factors of a dimension of size 0, with the features that the later sizes `after` do not need."""
    count = next((index for index, factor in enumerate(pending) if index > 0 and factor.size != 0), len(pending))
    empty = [pending.pop(0) for _ in range(count)]
    features_size = ratio(size_of(tuple(pending)), sympy.expand(sympy.Mul(*after)))
    features_taken = None if features_size is None or size_of(tuple(empty)) != 0 else _take(pending, features_size)
    return None if features_taken is None else (*empty, *features_taken)


def _take(pending: list[Part], wanted: sympy.Expr) -> Dimension | None:
    """Remove the first of `pending` that make up a dimension of size `wanted`, splitting the last if necessary."""
    taken: list[Part] = []
    if wanted == 1:
        if pending and pending[0].size == 1:
            taken.append(pending.pop(0))
        return tuple(taken)
    size: sympy.Expr = sympy.Integer(1)
    while size != wanted:
        if not pending:
            return None
        factor = pending.pop(0)
        missing = ratio(wanted, size)
        times = None if missing is None else ratio(missing, factor.size)
        if times is None and missing is not None and missing != 1 and (inner_size := ratio(factor.size, missing)):
            inner, factor = _split(factor, missing, inner_size)
            pending.insert(0, inner)
        elif times is None:
            return None
        taken.append(factor)
        size = sympy.expand(size * factor.size)
    return tuple(taken)


def _split(product: Part, outer: sympy.Expr, inner: sympy.Expr) -> tuple[Part, Part]:
    if product.share is None:
        return Part(inner), Part(outer)
    name = f"{outer} x {inner}"
    return Part(inner, (*product.share, (name, 1))), Part(outer, (*product.share, (name, 0)))


def _joined(factors: Dimension) -> Dimension:
    """Return `factors` with adjacent features joined, and both factors of a split of rows joined again."""
    joined: list[Part] = []
    for factor in factors:
        joined.append(factor)
        while len(joined) > 1 and (product := _join(*joined[-2:])) is not None:
            joined[-2:] = [product]
    return tuple(joined)


def _join(left: Part, right: Part) -> Part | None:
    size = sympy.expand(left.size * right.size)
    if left.share is None and right.share is None:
        return Part(size)
    if not left.share or not right.share or left.share[:-1] != right.share[:-1]:
        return None
    (left_name, first), (right_name, second) = left.share[-1], right.share[-1]
    return Part(size, left.share[:-1]) if left_name == right_name and (first, second) == (0, 1) else None


def ratio(total: sympy.Expr, unit: sympy.Expr) -> sympy.Expr | None:
    """Return total / unit if `unit` divides `total` for all values of the symbols, or None if that is not known."""
    if unit == 1:
        return total
    if total == unit:
        return sympy.Integer(1)
    if total.is_Integer and unit.is_Integer:
        return sympy.Integer(total // unit) if unit != 0 and total % unit == 0 else None
    if _is_product(total) and _is_product(unit) and unit.free_symbols <= total.free_symbols:
        # Dividing monomials, such as sequences · tokens, is cheap; equal factors may have the same symbol.
        quotient = total / unit
        return quotient if quotient.as_numer_denom()[1] == 1 else None
    if not total.free_symbols or (unit.free_symbols and total.free_symbols != unit.free_symbols):
        return None
    # Factoring a sum of hundreds of symbols is slow: guess the factor from one term, and verify it by multiplying.
    terms = total.as_coefficients_dict()
    term = min((term for term in terms if not term.is_number), key=str)
    above, below = terms[term], sympy.Integer(unit.as_coefficients_dict()[term]) if unit.free_symbols else unit
    if not above.is_Integer or not below.is_Integer or below == 0 or above % below:
        return None
    if not unit.free_symbols:
        quotient = sympy.expand(total / unit)
        is_integral = all(times.is_Integer for times in quotient.as_coefficients_dict().values())
        return quotient if is_integral else None
    times = sympy.Integer(above // below)
    return times if sympy.expand(times * unit) == total else None


def _is_product(size: sympy.Expr) -> bool:
    return bool(size.is_Symbol or size.is_Mul or size.is_Pow)


def broadcast(layouts: Iterable[Layout], shape: Sequence[Any]) -> Layout | None:
    """Return the layout of an elementwise result with `shape`, or None if it would combine different rows."""
    layouts = list(layouts)
    dimensions = []
    for dim in range(-len(shape), 0):
        size = size_expression(shape[dim])
        present = {
            layout.dimensions[dim]
            for layout in layouts
            if len(layout.dimensions) >= -dim and size_of(layout.dimensions[dim]) != 1
        }
        of_rows = [
            layout.dimensions[dim]
            for layout in layouts
            if len(layout.dimensions) >= -dim and layout.has_rows_along(dim)
        ]
        with_rows = {*(dimension for dimension in present if any(factor.is_rows for factor in dimension)), *of_rows}
        if not with_rows:
            dimensions.append(features(size))
        elif len(with_rows) == 1 and present <= with_rows and size_of(next(iter(with_rows))) == size:
            dimensions.append(next(iter(with_rows)))
        else:
            return None
    result = Layout(tuple(dimensions))
    return result if all(layout.shares == result.shares for layout in layouts) else None


def regrouped(factors: Iterable[T], size: Callable[[T], Any], shape: Iterable[Any]) -> list[tuple[T, ...]] | None:
    """Return the consecutive `factors` that make up each dimension of `shape`, or None if a factor would be cut."""
    remaining, dimensions = list(factors), []
    for wanted in map(size_expression, shape):
        count, product = 0, sympy.Integer(1)
        while product != wanted and count < len(remaining):
            product = sympy.expand(product * size_expression(size(remaining[count])))
            count += 1
        if product != wanted:
            return None
        dimensions.append(tuple(remaining[:count]))
        del remaining[:count]
    return None if remaining else dimensions
