"""Position of the experts' rows in the dimensions of a tensor.

Every dimension is a product of parts, outermost first: all rows, an exact share of them (rows of experts times slots,
say), or features. A view may join parts and take them apart again; as long as the rows can be followed, one row stays
one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import sympy

from moepass.passes.graph.input_sizes import size_expression

T = TypeVar("T")
# Of a share of rows: for each time that rows were taken apart, into what, and which of the two this is.
Share = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a dimension: `size` rows, where `share` is given, all of them for (); else so many features."""

    size: sympy.Expr
    share: Share | None = None

    @property
    def is_rows(self) -> bool:
        return self.share is not None


Dimension = tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parts of each dimension of a tensor. Without rows it is a constant, the same for all of them."""

    dimensions: tuple[Dimension, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """What shares of the rows there are, whatever the order."""
        parts = (part for dimension in self.dimensions for part in dimension)
        return tuple(sorted(part.share for part in parts if part.share is not None))

    @property
    def has_rows(self) -> bool:
        return bool(self.shares)

    @property
    def is_by_row(self) -> bool:
        """True where the first dimension is all rows, in their order, and the others are features."""
        first = self.dimensions[0] if self.dimensions else ()
        return bool(first) and first[0].share == () and len(first) == 1 and len(self.shares) == 1

    def has_rows_along(self, dim: int) -> bool:
        return any(part.is_rows for part in self.dimensions[dim])

    @property
    def of_a_row(self) -> tuple[sympy.Expr, ...]:
        """The sizes that a tensor of one row has. The order of rows and features in one dimension does not show."""
        return tuple(size_of(tuple(part for part in dimension if not part.is_rows)) for dimension in self.dimensions)


def rows_first(shape: Sequence[Any]) -> Layout:
    """Of a tensor [rows, features, ..]."""
    first, *rest = map(size_expression, shape)
    return Layout(((Part(first, ()),), *map(features, rest)))


def no_rows(shape: Sequence[Any]) -> Layout:
    return Layout(tuple(features(size) for size in shape))


def features(size: Any) -> Dimension:
    size = size_expression(size)
    return () if size == 1 else (Part(size),)


def size_of(dimension: Dimension) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*(part.size for part in dimension)))


def features_per_row(dimension: Dimension) -> int | None:
    """How many times all rows a dimension is long; None where it does not hold all rows."""
    if [part.share for part in dimension if part.is_rows] != [()]:
        return None
    return int(sympy.Mul(*(part.size for part in dimension if not part.is_rows)))


def reshaped(layout: Layout, shape: Sequence[Any]) -> Layout | None:
    """The same elements in the same order in another shape; None where the rows cannot be followed."""
    pending = [part for dimension in layout.dimensions for part in dimension]
    sizes = list(map(size_expression, shape))
    dimensions = []
    for place, size in enumerate(sizes):
        taken = _take_none(pending, sizes[place + 1 :]) if size == 0 else _take(pending, size)
        if taken is None:
            return None
        dimensions.append(_joined(taken))
    if pending and dimensions and all(part.size == 1 for part in pending):
        dimensions[-1] += tuple(pending)  # a single row
        pending = []
    return None if pending else Layout(tuple(dimensions))


def _take_none(pending: list[Part], after: Sequence[sympy.Expr]) -> Dimension | None:
    """As `_take`, for no rows at all: how many features go with them shows in what is left for the sizes `after`."""
    count = next((index for index, part in enumerate(pending) if index > 0 and part.size != 0), len(pending))
    taken = [pending.pop(0) for _ in range(count)]
    together = ratio(size_of(tuple(pending)), sympy.expand(sympy.Mul(*after)))
    features_taken = None if together is None or size_of(tuple(taken)) != 0 else _take(pending, together)
    return None if features_taken is None else (*taken, *features_taken)


def _take(pending: list[Part], wanted: sympy.Expr) -> Dimension | None:
    """The first of `pending` that make up a dimension of `wanted` size, taken out; the last is cut where need be."""
    taken: list[Part] = []
    if wanted == 1:
        if pending and pending[0].size == 1:
            taken.append(pending.pop(0))
        return tuple(taken)
    size: sympy.Expr = sympy.Integer(1)
    while size != wanted:
        if not pending:
            return None
        part = pending.pop(0)
        rest = ratio(wanted, size)
        times = None if rest is None else ratio(rest, part.size)
        if times is None and rest is not None and rest != 1 and (cut := ratio(part.size, rest)):
            inner, part = _cut(part, rest, cut)
            pending.insert(0, inner)
        elif times is None:
            return None
        taken.append(part)
        size = sympy.expand(size * part.size)
    return tuple(taken)


def _cut(part: Part, outer: sympy.Expr, inner: sympy.Expr) -> tuple[Part, Part]:
    """The inner and the outer factor of a part."""
    if part.share is None:
        return Part(inner), Part(outer)
    name = f"{outer} x {inner}"
    return Part(inner, (*part.share, (name, 1))), Part(outer, (*part.share, (name, 0)))


def _joined(parts: Dimension) -> Dimension:
    """Parts of features together, and shares of rows that are all of something again."""
    found: list[Part] = []
    for part in parts:
        found.append(part)
        while len(found) > 1 and (both := _together(*found[-2:])) is not None:
            found[-2:] = [both]
    return tuple(found)


def _together(left: Part, right: Part) -> Part | None:
    size = sympy.expand(left.size * right.size)
    if left.share is None and right.share is None:
        return Part(size)
    if not left.share or not right.share or left.share[:-1] != right.share[:-1]:
        return None
    (name, first), (other, second) = left.share[-1], right.share[-1]
    return Part(size, left.share[:-1]) if name == other and (first, second) == (0, 1) else None


def ratio(total: sympy.Expr, unit: sympy.Expr) -> sympy.Expr | None:
    """How often `unit` goes into `total`, for every size; None where it does not, or that is not known."""
    if unit == 1:
        return total
    if total == unit:
        return sympy.Integer(1)
    if total.is_Integer and unit.is_Integer:
        return sympy.Integer(total // unit) if unit != 0 and total % unit == 0 else None
    if _is_product(total) and _is_product(unit) and unit.free_symbols <= total.free_symbols:
        # Products alone, such as sequences times tokens of each. These may be as many, under one symbol.
        quotient = total / unit
        return quotient if quotient.as_numer_denom()[1] == 1 else None
    if not total.free_symbols or (unit.free_symbols and total.free_symbols != unit.free_symbols):
        return None
    # A sum of hundreds of symbols takes long to factor: one of its terms tells the factor, and a product verifies it.
    terms = total.as_coefficients_dict()
    term = min((term for term in terms if not term.is_number), key=str)
    above, below = terms[term], sympy.Integer(unit.as_coefficients_dict()[term]) if unit.free_symbols else unit
    if not above.is_Integer or not below.is_Integer or below == 0 or above % below:
        return None
    if not unit.free_symbols:
        quotient = sympy.expand(total / unit)
        whole = all(times.is_Integer for times in quotient.as_coefficients_dict().values())
        return quotient if whole else None
    times = sympy.Integer(above // below)
    return times if sympy.expand(times * unit) == total else None


def _is_product(size: sympy.Expr) -> bool:
    """Of sizes that a run tells, and numbers."""
    return bool(size.is_Symbol or size.is_Mul or size.is_Pow)


def broadcast(layouts: Iterable[Layout], shape: Sequence[Any]) -> Layout | None:
    """Of what elementwise operands with rows give together, of that `shape`; None where rows meet other rows."""
    layouts = list(layouts)
    dimensions = []
    for place in range(-len(shape), 0):
        size = size_expression(shape[place])
        met = {
            layout.dimensions[place]
            for layout in layouts
            if len(layout.dimensions) >= -place and size_of(layout.dimensions[place]) != 1
        }
        single = [
            layout.dimensions[place]
            for layout in layouts
            if len(layout.dimensions) >= -place and layout.has_rows_along(place)
        ]
        with_rows = {*(found for found in met if any(part.is_rows for part in found)), *single}
        if not with_rows:
            dimensions.append(features(size))
        elif len(with_rows) == 1 and met <= with_rows and size_of(next(iter(with_rows))) == size:
            dimensions.append(next(iter(with_rows)))
        else:
            return None
    found = Layout(tuple(dimensions))
    return found if all(layout.shares == found.shares for layout in layouts) else None


def regrouped(factors: Iterable[T], size: Callable[[T], Any], shape: Iterable[Any]) -> list[tuple[T, ...]] | None:
    """Return the consecutive `factors` that make up each dimension of `shape`, or None if a factor would be cut."""
    rest, dimensions = list(factors), []
    for wanted in map(size_expression, shape):
        count, product = 0, sympy.Integer(1)
        while product != wanted and count < len(rest):
            product = sympy.expand(product * size_expression(size(rest[count])))
            count += 1
        if product != wanted:
            return None
        dimensions.append(tuple(rest[:count]))
        del rest[:count]
    return None if rest else dimensions
