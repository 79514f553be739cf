"""Recipes that compute weights from stored tensors of a checkpoint, so that some rows of a weight can be read alone.

    Joined([Stacked(gates), Stacked(ups)], dim=1)    gate and up projections of all experts, [experts, 2h, H]
    .rows(2, 4)                                      the projections of experts 2 and 3, from fewer stored tensors
    .copy_to(target)                                 reads each stored tensor directly into its part of `target`

Rows can be taken if every step keeps the first dimension; otherwise `UnfollowedError` names the step.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles, FileRange, StoredTensor
from moepass.models.errors import CheckpointError, InputError
from moepass.models.layouts.layout import MatrixFormula, Role, scales_in_fp32
from moepass.models.layouts.packed_floats import PackedFormula
from moepass.models.layouts.weight_layout import WeightLayout

_aten = torch.ops.aten
# [Empirical] A larger tensor that needs temporary memory is computed row by row (expert by expert).
_READ_AT_ONCE_BYTES = 64 << 20
# torch computes on fewer numbers than 32,768 in the calling thread. [Empirical] With more, a check of one matrix waits
# for a pool of threads: beside other work on 2 cores, 384 checks of 49,152 scales took 9 to 13 s, in parts 0.8 s.
_SERIAL_NUMBERS = 32_767


class UnfollowedError(InputError):
    """Rows of a weight cannot be read alone, because of `operation`."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"single experts cannot be read through {operation}")
        self.operation = operation


class Recipe:
    """The computation of a tensor of `shape` and `dtype` from stored tensors."""

    __slots__ = ()
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Return the tensor. It is a view of a mapped file if no operation copies."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Recipe:
        """Return the recipe of rows [start, stop) of the first dimension. Raises UnfollowedError."""
        raise NotImplementedError

    @property
    def operation_name(self) -> str:
        """Name of the operation in errors."""
        return type(self).__name__.casefold()

    def sources(self) -> list[Recipe]:
        """Return the recipes of the tensors that this one is computed from."""
        sources: list[Recipe] = []
        tree_map_only(Recipe, sources.append, self._values())
        return sources

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that it reads."""
        return (stored for recipe in self.sources() for stored in recipe.stored())

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with the bytes of the contiguous tensor, in order, if files store them unchanged.

        Raises UnfollowedError, at the latest when exhausted, if the bytes must be computed.
        """
        raise NotImplementedError

    def checked(self) -> Iterator[Checked]:
        """Yield the stored tensors whose values are checked whenever they are read."""
        return (checked for recipe in self.sources() for checked in recipe.checked())

    def copy_to(self, target: torch.Tensor) -> None:
        """Write the tensor into `target`, of the same shape and any dtype and strides."""
        if self.nbytes > _READ_AT_ONCE_BYTES and self.shape and self.shape[0] > 1:
            # If rows cannot be taken, the tensor, usually the matrix of one expert, is computed at once.
            with contextlib.suppress(UnfollowedError):
                for row in range(self.shape[0]):
                    self.rows(row, row + 1).copy_to(target[row : row + 1])
                return
        _copy(self.read(), target)

    def describe(self) -> str:
        """Return a text that is equal for equal recipes, including dtypes and shapes of stored tensors."""
        return f"{type(self).__name__}{tree_map_only(Recipe, lambda recipe: recipe.describe(), self._values())}"

    def _values(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored(Recipe):
    """A stored tensor, or the rows `taken` of it."""

    files: CheckpointFiles
    tensor: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    taken: range | None = None

    def read(self) -> torch.Tensor:
        """Return a view of the mapped file."""
        return self.files.read(self.tensor, self.taken)

    def rows(self, start: int, stop: int) -> Stored:
        """Return the recipe of rows [start, stop)."""
        if not self.shape:
            raise UnfollowedError("a number without dimensions")
        first = self.taken.start if self.taken else 0
        taken = range(first + start, first + stop)
        return Stored(self.files, self.tensor, (stop - start, *self.shape[1:]), self.dtype, taken)

    def sources(self) -> list[Recipe]:
        """Return nothing."""
        return []

    def stored(self) -> Iterator[Stored]:
        """Yield the stored tensors that it reads."""
        yield self

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        row_bytes = self.nbytes // len(self.taken) if self.taken else 0
        yield FileRange(self.tensor, (self.taken.start if self.taken else 0) * row_bytes, self.nbytes)

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy from the mapped file, without a temporary tensor."""
        _copy(self.read(), target)

    def describe(self) -> str:
        """Return a text that is equal for equal recipes."""
        return f"{self.tensor.key} {self.dtype} {list(self.shape)} {self.taken}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked(Recipe):
    """Tensors of one shape and dtype, stacked along a new first dimension: usually one per expert."""

    parts: tuple[Recipe, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Read all parts into a new tensor."""
        return _filled(self)

    def rows(self, start: int, stop: int) -> Recipe:
        """Stack fewer parts."""
        return Stacked(self.parts[start:stop], (stop - start, *self.shape[1:]), self.dtype)

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        return (item for stacked in self.parts for item in stacked.file_ranges())

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy every part into its row of `target`."""
        for item, row in zip(self.parts, target, strict=True):
            item.copy_to(row)


@dataclasses.dataclass(frozen=True, slots=True)
class Joined(Recipe):
    """Tensors of one dtype, concatenated along `dim`, which is not the first: usually the rows of gate and up."""

    parts: tuple[Recipe, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Read all parts into a new tensor."""
        return _filled(self)

    def rows(self, start: int, stop: int) -> Recipe:
        """Concatenate the rows of all parts."""
        parts = tuple(item.rows(start, stop) for item in self.parts)
        return Joined(parts, self.dim, (stop - start, *self.shape[1:]), self.dtype)

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        if self.dim > 1:
            # Each expert would have many short runs, which cost more than their bytes.
            raise UnfollowedError(f"cat along dimension {self.dim}")
        for row in range(self.shape[0]):
            for item in self.parts:
                yield from item.rows(row, row + 1).file_ranges()

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy every part into its range of `target`."""
        pieces = target.split([item.shape[self.dim] for item in self.parts], self.dim)
        for item, piece in zip(self.parts, pieces, strict=True):
            item.copy_to(piece)


@dataclasses.dataclass(frozen=True, slots=True)
class Converted(Recipe):
    """A tensor that is converted to `dtype` when it is read."""

    source: Recipe
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the tensor."""
        return self.source.shape

    def read(self) -> torch.Tensor:
        """Read the tensor and convert it."""
        return self.source.read().to(self.dtype)

    def rows(self, start: int, stop: int) -> Recipe:
        """Convert fewer rows."""
        return Converted(self.source.rows(start, stop), self.dtype)

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        if self.dtype != self.source.dtype:
            raise UnfollowedError(f"a conversion from {self.source.dtype} to {self.dtype}")
        return self.source.file_ranges()

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy into `target`. Values are converted to `self.dtype` first, then to the dtype of `target`."""
        # `Tensor.copy_` converts, but directly from the stored dtype to that of `target`, skipping `self.dtype`.
        if target.dtype == self.dtype:
            self.source.copy_to(target)
        else:
            Recipe.copy_to(self, target)


@dataclasses.dataclass(frozen=True, slots=True)
class Checked(Recipe):
    """Stored scales, or block indices below `blocks`, which are checked whenever they are read."""

    source: Stored
    role: Role
    blocks: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the tensor."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the tensor."""
        return self.source.dtype

    def read(self) -> torch.Tensor:
        """Return a view of the mapped file. Raises CheckpointError for damaged values."""
        values = self.source.read()
        if self.role is not Role.BLOCK_INDICES:
            if not all(scales_in_fp32(some).isfinite().all() for some in values.flatten().split(_SERIAL_NUMBERS)):
                raise self._damaged("NaN or infinity; the scales of weights must be finite")
        # compressed-tensors writes -1 everywhere if columns are in order, see `is_in_order`.
        elif not (values == -1).all() and not (values.min() >= 0 and values.max() < self.blocks):
            raise self._damaged(f"an index outside of 0 to {self.blocks - 1}")
        return values

    @property
    def is_in_order(self) -> bool:
        """True for block indices of -1: columns are in order, and the formula needs no indices. Reads the indices."""
        return self.role is Role.BLOCK_INDICES and bool((self.read() == -1).all())

    def checked(self) -> Iterator[Checked]:
        """Yield this tensor."""
        yield self

    def rows(self, start: int, stop: int) -> Checked:
        """Check fewer rows."""
        return Checked(self.source.rows(start, stop), self.role, self.blocks)

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        return self.source.file_ranges()

    def _damaged(self, problem: str) -> CheckpointError:
        tensor = self.source.tensor
        text = f"{tensor.file}: {tensor.key} contains {problem}, so the file is damaged"
        return CheckpointError(text, name=tensor.key, path=tensor.file)


@dataclasses.dataclass(frozen=True, slots=True)
class InMemory(Recipe):
    """A tensor that was computed while the model is loaded.

    Only rows [first, first + len(values)) are in memory, those of this rank. `origin` describes what the tensor was
    computed from; it is equal on all ranks.
    """

    values: torch.Tensor
    first: int
    shape: tuple[int, ...]
    origin: str

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the tensor."""
        return self.values.dtype

    def read(self) -> torch.Tensor:
        """Return the tensor. All of its rows must be in memory."""
        assert self.values.shape == self.shape, f"rows {self.first} to {self.first + len(self.values)} are in memory"
        return self.values

    def rows(self, start: int, stop: int) -> InMemory:
        """Return the recipe of rows [start, stop)."""
        values = self.values[max(0, start - self.first) : max(0, stop - self.first)]
        return InMemory(values, max(0, self.first - start), (stop - start, *self.shape[1:]), self.origin)

    def sources(self) -> list[Recipe]:
        """Return nothing."""
        return []

    def file_ranges(self) -> Iterator[FileRange]:
        """Raise UnfollowedError: no file stores the tensor."""
        raise UnfollowedError("packing while it is loaded")

    def describe(self) -> str:
        """Return a text that is equal for equal recipes, on all ranks."""
        return f"{self.origin} {self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded(Recipe):
    """A quantised matrix, or one for each expert, decoded from stored tensors when it is read."""

    layout: WeightLayout
    parts: Mapping[Role, Stored | Checked | InMemory]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(layout: WeightLayout, stored: Mapping[Role, Stored], shape: tuple[int, ...], dtype: torch.dtype) -> Decoded:
        """Return the matrix of these stored tensors, which are checked when they are read.

        Reads block indices, and leaves them out if columns are in order. Raises CheckpointError if they are damaged.
        """
        formula, blocks = layout.formula, 0
        if isinstance(formula, MatrixFormula):
            rows, columns = shape[:-3:-1] if formula.is_transposed else shape[-2:]
            blocks = formula.block_counts(rows, columns)[1]
        checked = (Role.SCALES, Role.GLOBAL_SCALE, Role.BLOCK_INDICES)
        parts: dict[Role, Stored | Checked | InMemory] = {}
        for role, item in stored.items():
            recipe = Checked(item, role, blocks) if role in checked else item
            if not (isinstance(recipe, Checked) and recipe.is_in_order):
                parts[role] = recipe
        return Decoded(layout, parts, shape, dtype)

    def read(self) -> torch.Tensor:
        """Read the stored tensors and decode them, one expert after the other. Raises CheckpointError if damaged."""
        if self._has_experts:
            return _filled(self)
        tensors = {role: stored.read() for role, stored in self.parts.items()}
        if isinstance(self.layout.formula, PackedFormula):
            try:
                self.layout.formula.check(tensors)
            except CheckpointError as error:
                tensor = next(self.parts[Role.VALUES].stored()).tensor
                raise CheckpointError(f"{tensor.file}, {tensor.key}: {error}", path=tensor.file) from None
        return self.layout.formula.decode(tensors, self.dtype).contiguous()

    def rows(self, start: int, stop: int) -> Recipe:
        """Decode fewer experts. Raises UnfollowedError if there is only one matrix."""
        if len(self.shape) < 3:
            raise UnfollowedError(f"decoding {self.layout.name}")
        parts = {role: stored.rows(start, stop) for role, stored in self.parts.items()}
        return Decoded(self.layout, parts, (stop - start, *self.shape[1:]), self.dtype)

    def sources(self) -> list[Recipe]:
        """Return the stored tensors."""
        return list(self.parts.values())

    def file_ranges(self) -> Iterator[FileRange]:
        """Raise UnfollowedError: no file stores the decoded bytes."""
        raise UnfollowedError(f"decoding {self.layout.name}")

    def copy_to(self, target: torch.Tensor) -> None:
        """Decode into `target`, one expert after the other."""
        if not self._has_experts:
            target.copy_(self.read())
            return
        for row in range(self.shape[0]):
            self.rows(row, row + 1).copy_to(target[row : row + 1])

    @property
    def _has_experts(self) -> bool:
        return len(self.shape) > 2 and self.shape[0] > 1


def _copy(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy with memmove if the bytes stay the same, because `Tensor.copy_` would wake a whole pool of threads."""
    is_plain = all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
        for tensor in (values, target)
    )
    if is_plain and (values.dtype, values.shape) == (target.dtype, target.shape):
        ctypes.memmove(target.data_ptr(), values.data_ptr(), values.nbytes)
    else:
        target.copy_(values)


def _filled(recipe: Recipe) -> torch.Tensor:
    tensor = torch.empty(recipe.shape, dtype=recipe.dtype)
    recipe.copy_to(tensor)
    return tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed(Recipe):
    """Output `output` (None: the only one) of an operation without side effects, which runs when it is read."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Read the arguments and run the operation."""
        # Unread tensors have no strides, so transformers' conversion assumed contiguous tensors.
        unread = (self.arguments, dict(self.keywords))
        arguments, keywords = tree_map_only(Recipe, lambda recipe: recipe.read().contiguous(), unread)
        result: Any = self.operation(*arguments, **keywords)
        made: torch.Tensor = result if self.output is None else result[self.output]
        return made.contiguous()

    def rows(self, start: int, stop: int) -> Recipe:
        """Run the operation on rows of its first argument. Raises UnfollowedError."""
        source, *later = self.arguments
        rule = _ROW_RULES.get(self.operation)
        changed = None
        if rule and isinstance(source, Recipe) and self.shape and not any(isinstance(item, Recipe) for item in later):
            changed = rule(source.shape, self.shape, later, stop - start)
        if changed is None:
            raise UnfollowedError(self.operation_name)
        shape = (stop - start, *self.shape[1:])
        return dataclasses.replace(self, arguments=(source.rows(start, stop), *changed), shape=shape)

    def file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of files with its bytes."""
        source = self.arguments[0]
        if self.operation not in _KEEP_ORDER or not isinstance(source, Recipe):
            raise UnfollowedError(self.operation_name)
        return source.file_ranges()

    @property
    def operation_name(self) -> str:
        """Name of the operation in errors."""
        return str(self.operation).removeprefix("aten.").split(".")[0]


# Operations whose result has the same bytes as their first argument.
_KEEP_ORDER = (_aten.clone.default, _aten.view.default, _aten._unsafe_view.default)

# Operations whose rows depend only on the same rows of their first argument. Each rule receives the shapes of this
# argument and of the result, the later arguments, and a number of rows. It returns the later arguments for that many
# rows, or None.
_Rule = Callable[[Sequence[int], Sequence[int], list[Any], int], "list[Any] | None"]


def _reshapes(source: Sequence[int], shape: Sequence[int], later: list[Any], count: int) -> list[Any] | None:
    return [[count, *shape[1:]], *later[1:]] if source and source[0] == shape[0] and math.prod(shape[1:]) else None


def _unchanged_if(keeps_rows: Callable[[list[Any], int], bool]) -> _Rule:
    """Return the rule that keeps the later arguments if `keeps_rows(arguments, number of dimensions)` is true."""
    return lambda source, shape, later, count: later if keeps_rows(later, len(source)) else None


def _cuts_at(position: int) -> _Rule:
    """Return the rule for cuts along a dimension, which is argument `position` after the first, by default 0."""
    return _unchanged_if(lambda later, dims: len(later) > position and bool(later[position] % dims))


_ROW_RULES: Mapping[Any, _Rule] = {
    _aten.clone.default: _unchanged_if(lambda later, dims: True),
    _aten.view.default: _reshapes,
    _aten._unsafe_view.default: _reshapes,
    _aten.transpose.int: _unchanged_if(lambda later, dims: all(dim % dims for dim in later[:2])),
    _aten.permute.default: _unchanged_if(lambda later, dims: bool(later[0]) and later[0][0] % dims == 0),
    _aten.slice.Tensor: _cuts_at(0),
    _aten.split.Tensor: _cuts_at(1),
    _aten.split_with_sizes.default: _cuts_at(1),
}
