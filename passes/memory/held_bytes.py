"""Track the memory of a run, operation by operation: what each allocates, and how long it is held.

    storage     memory that one operation allocates; views share it
    held        a storage is held from the operation that makes it to the last one that reads it, or a view of it;
                if the last reader is part of a kernel, to the end of the kernel
    peak        the largest sum of bytes held at once: while an operation runs, its operands, its results, and the
                memory that it allocates temporarily

Bytes are sums of products of sizes (`Terms`). Which of two sums is larger may depend on the sizes, so there are several
peaks. A sum is dropped if another sum is at least as large in every term.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import sympy

# A sum: products of sizes with their factors.
Terms = Mapping[sympy.Expr, sympy.Expr]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a run.

    Attributes:
        reads: storages that it reads
        makes: storages that it allocates, with their bytes
        temporary: bytes that it allocates and frees while it runs; several if it has several peaks
        overwrites: storages that a result of equal size may reuse if nothing reads them afterwards
        kernel: equal for consecutive operations that run as one kernel; None if it runs alone
    """

    where: str
    reads: frozenset[int]
    makes: Mapping[int, sympy.Expr]
    temporary: Sequence[sympy.Expr] = ()
    overwrites: frozenset[int] = frozenset()
    kernel: int | None = None


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes held while the operation at `where` runs. No other peak is at least as large in every term."""

    terms: Terms
    where: str

    @property
    def expression(self) -> sympy.Expr:
        """The bytes as one expression."""
        return sympy.Add(*(factor * product for product, factor in self.terms.items()))


def peaks(operations: Sequence[Operation], held_to_end: Iterable[int] = ()) -> list[Peak]:
    """Return the sums that may be the largest. Storages in `held_to_end` are never freed."""
    last = {storage: position for position, operation in enumerate(operations) for storage in _touched(operation)}
    last.update(dict.fromkeys(held_to_end, len(operations)))
    ending_at: dict[int, list[int]] = {}
    for storage, position in last.items():
        ending_at.setdefault(position, []).append(storage)
    held: dict[sympy.Expr, sympy.Expr] = {}
    size_of: dict[int, sympy.Expr] = {}
    candidates: list[Peak] = []
    # Storages of the current kernel that nothing reads afterwards.
    freed_after_kernel: list[int] = []
    for position, operation in enumerate(operations):
        freed = [storage for storage in ending_at.get(position, ()) if storage in size_of]
        for size in operation.makes.values():
            reusable = (storage for storage in freed if storage in operation.overwrites and size_of[storage] == size)
            overwritten = next(reusable, None)
            if overwritten is not None:
                freed.remove(overwritten)
                _add(held, size_of.pop(overwritten), -1)
        for storage, size in operation.makes.items():
            size_of[storage] = size
            _add(held, size, 1)
            if last[storage] == position:
                freed.append(storage)
        if operation.makes or operation.temporary:
            for extra in operation.temporary or (sympy.Integer(0),):
                total = dict(held)
                _add(total, extra, 1)
                _add_peak(candidates, Peak(total, operation.where))
        freed_after_kernel += freed
        following = operations[position + 1].kernel if position + 1 < len(operations) else None
        if operation.kernel is None or following != operation.kernel:
            for storage in freed_after_kernel:
                _add(held, size_of.pop(storage), -1)
            freed_after_kernel = []
    return candidates


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


def _add_peak(candidates: list[Peak], new: Peak) -> None:
    if any(_is_within(new.terms, peak.terms) for peak in candidates):
        return
    candidates[:] = [peak for peak in candidates if not _is_within(peak.terms, new.terms)]
    candidates.append(new)


def _is_within(small: Terms, large: Terms) -> bool:
    """Return whether `small` is at most `large` for all nonnegative sizes."""
    return all(factor <= large.get(product, 0) for product, factor in small.items()) and all(
        factor >= 0 for product, factor in large.items() if product not in small
    )
