"""Follow a run's memory operation by operation: what each takes, and until when it is held.

    storage     memory that one operation allocates; views of it hold it too
    held        storages from the operation that makes them to the last one that reads them, itself or a view of it;
                where that one is a part of a kernel, to the kernel's end
    peak        the largest sum of what is held at once: while an operation runs its operands, its results, and what it
                allocates only for itself

Bytes are sums of products of sizes (`Terms`). Which of two sums is larger may depend on the sizes, so that there are
several peaks. A sum of which no term is larger than that of another sum is none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import sympy

# Products of sizes, each with its factor.
Terms = Mapping[sympy.Expr, sympy.Expr]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a run: the storages it `makes`, with their bytes, and those it reads.

    `temporary` are bytes that it allocates and gives back while it runs; several where it has several peaks of its own.
    A result takes the place of one of `overwrites` of the same size that nothing reads afterwards. `kernel`: equal for
    operations side by side that run as one; None: alone.
    """

    where: str
    reads: frozenset[int]
    makes: Mapping[int, sympy.Expr]
    temporary: Sequence[sympy.Expr] = ()
    overwrites: frozenset[int] = frozenset()
    kernel: int | None = None


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes that are held while the operation at `where` runs, in which nothing is larger than in another peak."""

    terms: Terms
    where: str

    @property
    def expression(self) -> sympy.Expr:
        return sympy.Add(*(factor * product for product, factor in self.terms.items()))


def peaks(operations: Sequence[Operation], kept: Iterable[int] = ()) -> list[Peak]:
    """What may be the most that is held at once. Storages in `kept` are held to the end."""
    last = {storage: place for place, operation in enumerate(operations) for storage in _touched(operation)}
    last.update(dict.fromkeys(kept, len(operations)))
    ending: dict[int, list[int]] = {}
    for storage, place in last.items():
        ending.setdefault(place, []).append(storage)
    held: dict[sympy.Expr, sympy.Expr] = {}
    size_of: dict[int, sympy.Expr] = {}
    found: list[Peak] = []
    # What the operations of a kernel read no more.
    over: list[int] = []
    for place, operation in enumerate(operations):
        gone = [storage for storage in ending.get(place, ()) if storage in size_of]
        for size in operation.makes.values():
            may = (storage for storage in gone if storage in operation.overwrites and size_of[storage] == size)
            overwritten = next(may, None)
            if overwritten is not None:
                gone.remove(overwritten)
                _add(held, size_of.pop(overwritten), -1)
        for storage, size in operation.makes.items():
            size_of[storage] = size
            _add(held, size, 1)
            if last[storage] == place:
                gone.append(storage)
        if operation.makes or operation.temporary:
            for extra in operation.temporary or (sympy.Integer(0),):
                sum_here = dict(held)
                _add(sum_here, extra, 1)
                _note(found, Peak(sum_here, operation.where))
        over += gone
        if operation.kernel is None or place + 1 == len(operations) or operations[place + 1].kernel != operation.kernel:
            for storage in over:
                _add(held, size_of.pop(storage), -1)
            over = []
    return found


def _touched(operation: Operation) -> Iterable[int]:
    yield from operation.reads
    yield from operation.makes


def _add(total: dict[sympy.Expr, sympy.Expr], size: sympy.Expr, sign: int) -> None:
    for product, factor in _terms(size).items():
        total[product] = total.get(product, 0) + sign * factor
        if not total[product]:
            del total[product]


@functools.lru_cache(maxsize=4096)
def _terms(size: sympy.Expr) -> Terms:
    return dict(sympy.expand(size).as_coefficients_dict())


def _note(found: list[Peak], new: Peak) -> None:
    if any(_is_within(new.terms, known.terms) for known in found):
        return
    found[:] = [known for known in found if not _is_within(known.terms, new.terms)]
    found.append(new)


def _is_within(small: Terms, large: Terms) -> bool:
    """True where `small` is no larger whatever the sizes are: none is below zero."""
    return all(factor <= large.get(product, 0) for product, factor in small.items()) and all(
        factor >= 0 for product, factor in large.items() if product not in small
    )
