"""The quantised matrices of a checkpoint: which of its stored tensors belong together, and in which layout."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from moepass.models.errors import CheckpointError
from moepass.models.layouts.layout import Layout, Role
from moepass.models.layouts.published import Quantization

# Ends of the keys of tensors that only quantised activations and caches need, or that repeat a shape.
_UNREAD_ENDS = (
    "input_scale", "input_global_scale", "output_scale", "activation_scale", "k_scale", "v_scale", "q_scale",
    "weight_shape",
)  # fmt: skip
_REPEATS, _REPEATED_GROUP, _MOST_REPEATS = re.compile(r"[*+{]"), re.compile(r"\)[*+?{]"), 3


class TensorDescription(Protocol):
    """The shape and dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of the model: the keys of its stored tensors, and its shape [..., out, in] or [..., in, out]."""

    layout: Layout
    keys: Mapping[Role, str]
    shape: tuple[int, ...]


def quantized_matrices(
    quantization: Quantization, tensors: Mapping[str, TensorDescription], name: str
) -> tuple[dict[str, QuantizedMatrix], set[str]]:
    """Return the quantised matrices of the checkpoint `name` by the key of the matrix, and keys that nothing reads.

    Raises CheckpointError if a tensor is missing or does not fit the others, if scales have no values, or if a
    quantised module is one that the configuration says is not quantised.
    """
    matrices: dict[str, QuantizedMatrix] = {}
    read: set[str] = set()
    for layout in quantization.layouts:
        ending = layout.suffixes[Role.VALUES]
        for key, values in tensors.items():
            if key in read or not key.endswith(ending) or values.dtype not in layout.values.dtypes:
                continue
            stem = key.removesuffix(ending)
            keys = {role: stem + suffix for role, suffix in layout.suffixes.items()}
            if not tensors.keys() >= set(keys.values()):
                continue
            if layout.groups_suffix and stem + layout.groups_suffix in tensors:
                keys[Role.GROUPS] = stem + layout.groups_suffix
            shape = _checked_shape(layout, {role: (keys[role], tensors[keys[role]]) for role in keys}, name)
            if pattern := _ignored_by(quantization.ignored, key):
                raise CheckpointError(
                    f"{name}: {key} is stored as {layout.name}, but {pattern!r} in the quantization_config says that "
                    "it is not quantised",
                    name=key,
                    value=layout.name,
                    expected=pattern,
                )
            matrices[stem + layout.matrix] = QuantizedMatrix(layout, keys, shape)
            read.update(keys.values())
    unread = {key for key in tensors if key.endswith(_UNREAD_ENDS)} - read
    _check_rest(quantization, tensors.keys() - read - unread, tensors, name)
    return matrices, unread


def _checked_shape(layout: Layout, tensors: Mapping[Role, tuple[str, TensorDescription]], name: str) -> tuple[int, ...]:
    """Return the shape of the matrix. Raises CheckpointError if the stored tensors do not fit together."""
    key, values = tensors[Role.VALUES]
    if len(values.shape) < (3 if layout.values.folded else 2):
        raise _misfit(name, key, values, "at least 2 dimensions")
    *leading, rows, columns = layout.values.shape(values.shape)
    groups = layout.groups(rows, columns)
    block_columns = layout.block[1]
    if block_columns is not None and layout.block[0] == 1 and columns % block_columns:
        raise _misfit(name, key, values, f"a multiple of {block_columns} columns, the size of a group")
    stored_groups = groups[::-1] if layout.values.transposed else groups
    expected = {
        Role.SCALES: [(*leading, *stored_groups), *([(*leading, groups[0])] if groups[1] == 1 else [])]
        + ([tuple(leading), (*leading, 1)] if groups == (1, 1) else []),
        Role.GLOBAL_SCALE: [tuple(leading), (*leading, 1)],
        Role.GROUPS: [(*leading, columns)],
    }
    dtypes: Mapping[Role, Collection[torch.dtype]] = {
        Role.SCALES: layout.scales,
        Role.GLOBAL_SCALE: (torch.float32,),
        Role.GROUPS: (torch.int32, torch.int64),
    }
    for role in expected.keys() & tensors.keys():
        key, tensor = tensors[role]
        if tensor.dtype not in dtypes[role]:
            raise _misfit(name, key, tensor, " or ".join(str(dtype) for dtype in dtypes[role]))
        if tuple(tensor.shape) not in expected[role]:
            raise _misfit(name, key, tensor, f"shape {list(expected[role][0])}")
    if layout.zero_points is not None:
        key, tensor = tensors[Role.ZERO_POINTS]
        packing = layout.zero_points
        if tensor.dtype not in packing.dtypes or len(tensor.shape) != len(values.shape):
            raise _misfit(name, key, tensor, f"{packing.dtypes[0]} with {len(values.shape)} dimensions")
        *zeros_leading, zero_rows, zero_columns = packing.shape(tensor.shape)
        fits = zeros_leading == leading and zero_columns == groups[1]
        if not fits or zero_rows != -(-groups[0] // packing.count) * packing.count:
            raise _misfit(name, key, tensor, f"zero points of {groups[0]} rows and {groups[1]} groups")
    return (*leading, columns, rows) if layout.is_transposed else (*leading, rows, columns)


def _misfit(name: str, key: str, tensor: TensorDescription, expected: str) -> CheckpointError:
    text = f"{name}: {key} is {tensor.dtype} {list(tensor.shape)}; expected {expected}"
    return CheckpointError(text, name=key, value=(tensor.dtype, tuple(tensor.shape)), expected=expected)


def _check_rest(
    quantization: Quantization, keys: Collection[str], tensors: Mapping[str, TensorDescription], name: str
) -> None:
    """Raise CheckpointError if a quantised tensor belongs to no matrix of a known layout."""
    endings = {suffix for layout in quantization.layouts for suffix in layout.suffixes.values() if suffix}
    endings -= {"weight"}
    for key in sorted(keys):
        is_part = any(key.endswith(ending) for ending in endings)
        if is_part or tensors[key].dtype.itemsize == 1 or tensors[key].dtype == torch.int32:
            layouts = [
                f"{layout.name} ({', '.join(f'*{suffix}' for suffix in layout.suffixes.values())})"
                for layout in quantization.layouts
            ]
            raise CheckpointError(
                f"{name}: {key} ({tensors[key].dtype} {list(tensors[key].shape)}) belongs to no quantised matrix; a "
                f"tensor beside it is missing, or has another layout than {' or '.join(layouts)}",
                name=key,
                value=tensors[key].dtype,
                expected=layouts,
            )


def _ignored_by(patterns: Collection[str], key: str) -> str:
    """Return the pattern that excludes the module of tensor `key`; empty if none does."""
    module = key.rpartition(".")[0]
    return next((pattern for pattern in patterns if _excludes(pattern, module)), "")


def _excludes(pattern: str, module: str) -> bool:
    expression = pattern.removeprefix("re:")
    if expression != pattern:
        # A pattern that a file brings must not make `re` try exponentially many matches.
        is_simple = len(_REPEATS.findall(expression)) <= _MOST_REPEATS and not _REPEATED_GROUP.search(expression)
        return is_simple and re.match(expression, module) is not None
    if module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}"):
        return True
    return "*" in pattern and re.match(".*".join(map(re.escape, pattern.split("*"))) + r"(?:\.|$)", module) is not None
