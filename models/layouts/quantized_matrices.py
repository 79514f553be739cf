"""The quantised matrices of a checkpoint: which of its stored tensors belong together, and in which layout."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import MatrixFormula, Role
from moepass.models.layouts.published import Quantization
from moepass.models.layouts.weight_layout import PackedMatrixFormula, WeightLayout

# Suffixes of tensors for quantised activations and caches, which moepass does not use, and of the shape of a matrix.
_SKIPPED_SUFFIXES = tuple(
    f".{name}"
    for name in (
        *("input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
        *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale", "k_global_scale", "v_global_scale"),
        "weight_shape",
    )
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class TensorDescription(Protocol):
    """The shape and dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


_Keyed = tuple[str, TensorDescription]


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of the model: the keys of its stored tensors, and its shape [..., out, in] or [..., in, out]."""

    layout: WeightLayout
    keys: Mapping[Role, str]
    shape: tuple[int, ...]


def quantized_matrices(
    quantization: Quantization, tensors: Mapping[str, TensorDescription], name: str
) -> tuple[dict[str, QuantizedMatrix], set[str]]:
    """Return the quantised matrices of the checkpoint `name` by the key of the matrix, and the keys to skip.

    Raises CheckpointError if a tensor is missing or does not fit the others, if a matrix is stored twice, or if a
    quantised module is one that the configuration says is not quantised.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    claimed: set[str] = set()
    ignored = _Ignored(quantization.ignored)
    for key, values in tensors.items():
        candidates = list(_candidates(quantization.layouts, key, values.dtype, tensors))
        if not candidates or key in claimed:
            continue
        matrix_key, matrix = _first_that_fits(candidates, tensors, name)
        keys = set(matrix.keys.values())
        if not claimed.isdisjoint(keys) or (matrix_key in tensors and matrix_key not in keys):
            text = f"{name}: {key} and another tensor both contain the weight {matrix_key}"
            raise CheckpointError(text, name=matrix_key)
        if pattern := ignored.pattern_of(key.rpartition(".")[0]):
            raise CheckpointError(
                f"{name}: {key} is stored as {matrix.layout.name}, but {pattern!r} in the quantization_config says "
                "that it is not quantised",
                name=key,
                value=matrix.layout.name,
                expected=pattern,
            )
        matrices[matrix_key] = matrix
        claimed |= keys
    skipped = {key for key in tensors if key.endswith(_SKIPPED_SUFFIXES)} - claimed
    for key in sorted(tensors.keys() - claimed - skipped):
        # Other tensors with unknown names are an error later. These could be read as weights, without their scales.
        is_values = any(
            key.endswith(layout.suffixes[Role.VALUES]) and tensors[key].dtype in layout.dtypes
            for layout in quantization.layouts
        )
        if is_values or tensors[key].dtype in (*_FLOAT8, torch.uint8, torch.int8):
            raise _incomplete(quantization, key, tensors, name)
    return matrices, skipped


def _candidates(
    layouts: Collection[WeightLayout], key: str, dtype: torch.dtype, tensors: Mapping[str, TensorDescription]
) -> Iterator[tuple[str, WeightLayout, dict[Role, str]]]:
    """Yield the key of the matrix, the layout and the keys by role, for each layout whose tensors exist."""
    for layout in layouts:
        suffix = layout.suffixes[Role.VALUES]
        if dtype not in layout.dtypes or not key.endswith(suffix):
            continue
        stem = key.removesuffix(suffix)
        keys = {role: stem + suffix for role, suffix in layout.suffixes.items()}
        if tensors.keys() >= set(keys.values()):
            keys |= {role: stem + suffix for role, suffix in layout.optional.items() if stem + suffix in tensors}
            yield stem + layout.matrix_suffix, layout, keys


def _first_that_fits(
    candidates: list[tuple[str, WeightLayout, dict[Role, str]]], tensors: Mapping[str, TensorDescription], name: str
) -> tuple[str, QuantizedMatrix]:
    """Return the first matrix whose tensors fit together; those with the most tensors come first."""
    errors = []
    for matrix_key, layout, keys in sorted(candidates, key=lambda candidate: -len(candidate[2])):
        try:
            shape = _checked_shape(layout, {role: (key, tensors[key]) for role, key in keys.items()}, name)
        except CheckpointError as error:
            errors.append(error)
        else:
            return matrix_key, QuantizedMatrix(layout, keys, shape)
    raise errors[0]


def _checked_shape(
    layout: WeightLayout, tensors: Mapping[Role, tuple[str, TensorDescription]], name: str
) -> tuple[int, ...]:
    """Return the shape of the matrix. Raises CheckpointError if the stored tensors do not fit together."""
    key, values = tensors[Role.VALUES]
    is_folded = isinstance(layout.formula, MatrixFormula) and layout.formula.packing.folded
    if len(values.shape) < (3 if is_folded else 2) or 0 in values.shape:
        raise _misfit(name, key, values, "2 or more dimensions, none of them empty")
    formula = layout.formula
    if not isinstance(formula, MatrixFormula):
        return _checked_packed_shape(formula, tensors, name)
    *leading, rows, columns = formula.packing.shape(values.shape)
    blocks = formula.block_counts(rows, columns)
    per_matrix = [(*leading,), (*leading, 1)]
    shapes: dict[Role, list[tuple[int, ...]]] = defaultdict(list)
    shapes[Role.SCALES] = [(*leading, *(blocks[::-1] if formula.packing.transposed else blocks))]
    if blocks[1] == 1:
        shapes[Role.SCALES].append((*leading, blocks[0]))
    if blocks == (1, 1):
        shapes[Role.SCALES] += per_matrix
    shapes[Role.GLOBAL_SCALE] = per_matrix
    shapes[Role.BLOCK_INDICES] = [(*leading, columns)]
    dtypes: dict[Role, tuple[torch.dtype, ...]] = {
        Role.SCALES: layout.scales,
        Role.GLOBAL_SCALE: (torch.float32,),
        Role.BLOCK_INDICES: (torch.int32, torch.int64),
    }
    if (packing := formula.zero_points) is not None:
        stored_rows = -(-blocks[0] // packing.count)
        shapes[Role.ZERO_POINTS] = [
            (*leading, *((blocks[1], stored_rows) if packing.transposed else (stored_rows, blocks[1])))
        ]
        dtypes[Role.ZERO_POINTS] = layout.dtypes
    for role in tensors.keys() - {Role.VALUES}:
        key, tensor = tensors[role]
        if tensor.dtype not in dtypes[role]:
            raise _misfit(name, key, tensor, " or ".join(str(dtype) for dtype in dtypes[role]))
        if tuple(tensor.shape) not in shapes[role]:
            raise _misfit(name, key, tensor, f"shape {list(shapes[role][0])} for {layout.name} [{rows}, {columns}]")
    return (*leading, columns, rows) if formula.is_transposed else (*leading, rows, columns)


def _checked_packed_shape(
    formula: PackedMatrixFormula, tensors: Mapping[Role, tuple[str, TensorDescription]], name: str
) -> tuple[int, ...]:
    (key, values), (sections_key, sections) = tensors[Role.VALUES], tensors[Role.SECTIONS]
    *leading, rows, columns = formula.shape(tuple(values.shape))
    if values.shape[-1] % formula.type.value_bytes:
        raise _misfit(name, key, values, f"rows of {formula.type.value_bytes} bytes for each element")
    least = formula.least_bytes(rows, columns)
    *sections_leading, nbytes = sections.shape or (0,)
    if sections.dtype != torch.uint8 or sections_leading != leading or nbytes < least or nbytes % 8:
        expected = f"torch.uint8 {[*leading, -(-least // 8) * 8]}, or a larger multiple of 8 at the end"
        raise _misfit(name, sections_key, sections, expected)
    return (*leading, rows, columns)


def _misfit(name: str, key: str, tensor: TensorDescription, expected: str) -> CheckpointError:
    text = f"{name}: {key} is {tensor.dtype} {list(tensor.shape)}; expected {expected}"
    return CheckpointError(text, name=key, value=(tensor.dtype, tuple(tensor.shape)), expected=expected)


def _incomplete(
    quantization: Quantization, key: str, tensors: Mapping[str, TensorDescription], name: str
) -> CheckpointError:
    """Return the error of a quantised tensor that belongs to no complete matrix."""
    missing = []
    for layout in quantization.layouts:
        suffix = layout.suffixes[Role.VALUES]
        if key.endswith(suffix) and tensors[key].dtype in layout.dtypes:
            stem = key.removesuffix(suffix)
            lacking = [stem + suffix for suffix in layout.suffixes.values() if stem + suffix not in tensors]
            missing.append(f"{' and '.join(lacking)} ({layout.name})")
    cause = f"the checkpoint lacks {', or '.join(missing)}" if missing else "no quantised matrix contains it"
    text = f"{name}: {key} is {tensors[key].dtype}, quantised by {quantization.method!r}, but {cause}"
    return CheckpointError(text, name=key, value=tensors[key].dtype, expected=missing)


class _Ignored:
    """The modules that a configuration excludes: by names, by globs, or by regular expressions that are globs.

    Other regular expressions exclude nothing here: a file could bring one that takes forever.
    """

    def __init__(self, patterns: Collection[str]) -> None:
        globs = {pattern: _glob(pattern) for pattern in patterns}
        self._names = {pattern for pattern in patterns if globs[pattern] == pattern and "*" not in pattern}
        self._globs = {
            pattern: re.compile(fnmatch.translate(glob))
            for pattern, glob in globs.items()
            if glob is not None and pattern not in self._names
        }

    def pattern_of(self, module: str) -> str:
        """Return the pattern that excludes `module`; empty if none does."""
        parts = module.split(".")
        for index in range(len(parts)):
            for name in (".".join(parts[: index + 1]), ".".join(parts[index:])):
                if name in self._names:
                    return name
        return next((pattern for pattern, glob in self._globs.items() if glob.match(module)), "")


def _glob(pattern: str) -> str | None:
    """Return a pattern as a glob, or None for a regular expression that is no glob."""
    expression = pattern.removeprefix("re:")
    if expression == pattern:
        return pattern if "*" not in pattern else f"{pattern}*"
    # Stars of the glob are null characters until other special characters are excluded.
    glob = re.sub(r"\.\*|\\d\+|\[0-9\]\+", "\0", expression.removeprefix("^")).replace(r"\.", ".")
    glob = glob.removesuffix("$") if glob.endswith("$") else f"{glob}\0"
    return None if set(glob) & set("\\()[]{}+*?|^$") else glob.replace("\0", "*")
