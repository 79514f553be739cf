"""How weights are made of the tensors stored in a checkpoint, so that some rows of a weight can be read alone.

    Joined([Stacked(gates), Stacked(ups)], dim=1)    gate and up projections of all experts, [experts, 2h, H]
    .rows(2, 4)                                      those of experts 2 and 3: the same of fewer stored tensors
    .copy_to(place)                                  reads each of them, straight to where it belongs

Rows can be taken where the first dimension stays what it is all the way; `UnfollowedError` says where it does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles, FileRange, StoredTensor
from moepass.models.errors import InputError

_aten = torch.ops.aten
# [Empirical] A part that has to be made in memory of its own is made row by row (expert by expert) if it is larger.
_READ_AT_ONCE_BYTES = 64 << 20


class UnfollowedError(InputError):
    """Rows of a weight cannot be read alone, because of `operation`."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"single experts cannot be read through {operation}")
        self.operation = operation


class Recipe:
    """How a tensor of `shape` and `dtype` is made from stored tensors."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """The tensor: exactly what its operations give; a view of a mapped file where none of them copies."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Recipe:
        """Rows [start, stop) of the first dimension. Raises UnfollowedError."""
        raise NotImplementedError

    def stored(self) -> Iterator[Stored]:
        """The stored tensors that it reads."""
        raise NotImplementedError

    def file_ranges(self) -> Iterator[FileRange]:
        """Positions in files of the bytes of the contiguous tensor, in order, if files hold them unchanged.

        Raises UnfollowedError, by its end, where they have to be made.
        """
        raise NotImplementedError

    def copy_to(self, target: torch.Tensor) -> None:
        """Write the tensor into `target`, of the same shape and whatever type and strides."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if nbytes > _READ_AT_ONCE_BYTES and self.shape and self.shape[0] > 1:
            # Where rows cannot be taken, it is the matrix of one expert that is made whole.
            with contextlib.suppress(UnfollowedError):
                for row in range(self.shape[0]):
                    self.rows(row, row + 1).copy_to(target[row : row + 1])
                return
        target.copy_(self.read())

    def describe(self) -> str:
        """A text that is equal for equal recipes; types and shapes of what is stored included."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Stored(Recipe):
    """Rows of a stored tensor, or all of it (`taken` is None)."""

    files: CheckpointFiles
    tensor: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    taken: range | None = None

    def read(self) -> torch.Tensor:
        return self.files.read(self.tensor, self.taken)

    def rows(self, start: int, stop: int) -> Recipe:
        if not self.shape:
            raise UnfollowedError("a number without dimensions")
        first = self.taken.start if self.taken else 0
        taken = range(first + start, first + stop)
        return Stored(self.files, self.tensor, (stop - start, *self.shape[1:]), self.dtype, taken)

    def stored(self) -> Iterator[Stored]:
        yield self

    def file_ranges(self) -> Iterator[FileRange]:
        row_bytes = self.nbytes // len(self.taken) if self.taken else 0
        yield FileRange(self.tensor, (self.taken.start if self.taken else 0) * row_bytes, self.nbytes)

    def copy_to(self, target: torch.Tensor) -> None:
        # No part in memory of its own: the copy reads the mapped file.
        target.copy_(self.read())

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def describe(self) -> str:
        return f"{self.tensor.key} {self.dtype} {list(self.shape)} {self.taken}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked(Recipe):
    """Tensors of one shape and type, stacked to the first dimension: one per expert, most of the time."""

    parts: tuple[Recipe, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        return torch.stack([part.read() for part in self.parts])

    def rows(self, start: int, stop: int) -> Recipe:
        return Stacked(self.parts[start:stop], (stop - start, *self.shape[1:]), self.dtype)

    def stored(self) -> Iterator[Stored]:
        return (stored for part in self.parts for stored in part.stored())

    def file_ranges(self) -> Iterator[FileRange]:
        return (part for stacked in self.parts for part in stacked.file_ranges())

    def copy_to(self, target: torch.Tensor) -> None:
        for part, row in zip(self.parts, target, strict=True):
            part.copy_to(row)

    def describe(self) -> str:
        return f"stack({', '.join(part.describe() for part in self.parts)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Joined(Recipe):
    """Tensors of one type, joined along `dim`, which is not the first: the rows of gate and up, most of the time."""

    parts: tuple[Recipe, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        return torch.cat([part.read() for part in self.parts], self.dim)

    def rows(self, start: int, stop: int) -> Recipe:
        parts = tuple(part.rows(start, stop) for part in self.parts)
        return Joined(parts, self.dim, (stop - start, *self.shape[1:]), self.dtype)

    def stored(self) -> Iterator[Stored]:
        return (stored for part in self.parts for stored in part.stored())

    def file_ranges(self) -> Iterator[FileRange]:
        if self.dim > 1:
            # Short runs, many for each expert: they would cost more than the bytes in them.
            raise UnfollowedError(f"cat along dimension {self.dim}")
        for row in range(self.shape[0]):
            for part in self.parts:
                yield from part.rows(row, row + 1).file_ranges()

    def copy_to(self, target: torch.Tensor) -> None:
        places = target.split([part.shape[self.dim] for part in self.parts], self.dim)
        for part, place in zip(self.parts, places, strict=True):
            part.copy_to(place)

    def describe(self) -> str:
        return f"cat({', '.join(part.describe() for part in self.parts)}; {self.dim})"


@dataclasses.dataclass(frozen=True, slots=True)
class Converted(Recipe):
    """A tensor in another number type."""

    part: Recipe
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.part.shape

    def read(self) -> torch.Tensor:
        return self.part.read().to(self.dtype)

    def rows(self, start: int, stop: int) -> Recipe:
        return Converted(self.part.rows(start, stop), self.dtype)

    def stored(self) -> Iterator[Stored]:
        return self.part.stored()

    def file_ranges(self) -> Iterator[FileRange]:
        if self.dtype != self.part.dtype:
            raise UnfollowedError(f"a conversion from {self.part.dtype} to {self.dtype}")
        return self.part.file_ranges()

    def copy_to(self, target: torch.Tensor) -> None:
        # The copy converts by itself, but only once: a type in between would be left out.
        if target.dtype == self.dtype:
            self.part.copy_to(target)
        else:
            Recipe.copy_to(self, target)

    def describe(self) -> str:
        return f"{self.dtype}({self.part.describe()})"


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed(Recipe):
    """Output `output` of any operation without side effects, run when it is read; None where it has one output only."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        # What is not read yet has no strides: transformers' conversion saw contiguous tensors, and must see them here.
        parts = (self.arguments, dict(self.keywords))
        arguments, keywords = tree_map_only(Recipe, lambda part: part.read().contiguous(), parts)
        result: Any = self.operation(*arguments, **keywords)
        made: torch.Tensor = result if self.output is None else result[self.output]
        return made.contiguous()

    def rows(self, start: int, stop: int) -> Recipe:
        arguments = self._row_arguments(start, stop)
        if arguments is None:
            raise UnfollowedError(self._name)
        shape = (stop - start, *self.shape[1:])
        return dataclasses.replace(self, arguments=arguments, shape=shape)

    def file_ranges(self) -> Iterator[FileRange]:
        part = self.arguments[0]
        if self.operation not in _KEEP_ORDER or not isinstance(part, Recipe):
            raise UnfollowedError(self._name)
        return part.file_ranges()

    @property
    def _name(self) -> str:
        return str(self.operation).removeprefix("aten.").split(".")[0]

    def _row_arguments(self, start: int, stop: int) -> tuple[Any, ...] | None:
        """The arguments that give rows [start, stop) of the result; None where there are none."""
        part, *rest = self.arguments
        if not isinstance(part, Recipe) or not self.shape or any(isinstance(item, Recipe) for item in rest):
            return None
        rule = _ROW_RULES.get(self.operation)
        changed = rule(part.shape, self.shape, rest, stop - start) if rule else None
        return None if changed is None else (part.rows(start, stop), *changed)

    def stored(self) -> Iterator[Stored]:
        parts: list[Recipe] = []
        tree_map_only(Recipe, parts.append, (self.arguments, dict(self.keywords)))
        return (stored for part in parts for stored in part.stored())

    def describe(self) -> str:
        arguments = tree_map_only(Recipe, lambda part: part.describe(), (self.arguments, dict(self.keywords)))
        return f"{self.operation}{arguments}[{self.output}]"


# Operations whose result has the same bytes as their first argument.
_KEEP_ORDER = (_aten.clone.default, _aten.view.default, _aten._unsafe_view.default)

# Operations whose rows are made of the same rows of their first argument. Each rule takes the shapes of that argument
# and of the result, the other arguments and a number of rows, and returns the other arguments for that many rows, or
# None.
_Rule = Callable[[Sequence[int], Sequence[int], list[Any], int], "list[Any] | None"]


def _keeps_rows(part: Sequence[int], shape: Sequence[int], rest: list[Any], count: int) -> list[Any] | None:
    return rest


def _reshapes(part: Sequence[int], shape: Sequence[int], rest: list[Any], count: int) -> list[Any] | None:
    return [[count, *shape[1:]], *rest[1:]] if part and part[0] == shape[0] and math.prod(shape[1:]) else None


def _transposes(part: Sequence[int], shape: Sequence[int], rest: list[Any], count: int) -> list[Any] | None:
    return rest if all(dim % len(part) for dim in rest[:2]) else None


def _permutes(part: Sequence[int], shape: Sequence[int], rest: list[Any], count: int) -> list[Any] | None:
    return rest if rest[0] and rest[0][0] % len(part) == 0 else None


def _cuts_at(position: int) -> _Rule:
    """Cuts along a dimension, argument number `position` after the first one, 0 if it is left out."""

    def rule(part: Sequence[int], shape: Sequence[int], rest: list[Any], count: int) -> list[Any] | None:
        return rest if len(rest) > position and rest[position] % len(part) else None

    return rule


_ROW_RULES: Mapping[Any, _Rule] = {
    _aten.clone.default: _keeps_rows,
    _aten.view.default: _reshapes,
    _aten._unsafe_view.default: _reshapes,
    _aten.transpose.int: _transposes,
    _aten.permute.default: _permutes,
    _aten.slice.Tensor: _cuts_at(0),
    _aten.split.Tensor: _cuts_at(1),
    _aten.split_with_sizes.default: _cuts_at(1),
}


def recipe_digest(recipe: Recipe) -> str:
    """A word that is equal where a tensor is made in the same way of stored tensors of the same types and shapes."""
    return hashlib.blake2b(recipe.describe().encode(), digest_size=8).hexdigest()
