"""Tensors that are not read yet: they record from which stored tensors, and how, they are computed.

For every family, transformers knows how the tensors of a checkpoint become the weights of a model: which are renamed,
stacked, joined, transposed. Its loader receives `UnreadTensor`s instead of tensors, runs its conversion on them, and
sets the results in the model, without reading a byte. A weight, or a part of it, is read when it is copied:

    weight = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)    by transformers: [experts, 2h, H]
    shard.copy_(weight[2:4])                                             reads gates 2 and 3, and ups 2 and 3
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moepass.models.checkpoint.checkpoint_files import CheckpointFiles
from moepass.models.checkpoint.weight_recipes import (
    Converted,
    Decoded,
    Joined,
    Recipe,
    Replayed,
    Stacked,
    Stored,
    UnfollowedError,
)
from moepass.models.errors import CheckpointError, InputError
from moepass.models.layouts.published import Quantization
from moepass.models.layouts.quantized_matrices import quantized_matrices

_aten = torch.ops.aten


class UnreadTensor(torch.Tensor):
    """A CPU tensor with shape and dtype, whose elements are read when it is copied into another tensor."""

    recipe: Recipe

    @staticmethod
    def __new__(cls, recipe: Recipe) -> UnreadTensor:
        """Make a tensor with the shape and dtype of `recipe`, without storage."""
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadTensor({list(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if operation is _aten.copy_.default and not isinstance(args[0], UnreadTensor):
            if args[0].numel():
                args[1].recipe.copy_to(args[0])
            return args[0]
        if operation is _aten.equal.default:  # transformers compares tied weights that are both stored
            first, second = (item.recipe.read() if isinstance(item, UnreadTensor) else item for item in args)
            return torch.equal(first, second)
        if operation is _aten._local_scalar_dense.default:
            raise InputError("item() needs the value of a weight that is not read yet")
        if operation._schema.is_mutable:
            raise InputError(f"{operation} changes a weight that is not read yet", name=str(operation))
        if operation in (_aten.detach.default, _aten.alias.default):
            return UnreadTensor(args[0].recipe)
        arguments, keywords = tree_map_only(UnreadTensor, lambda tensor: tensor.recipe, (args, keywords))
        recipe = _special(operation, arguments, keywords)
        return UnreadTensor(recipe) if recipe is not None else _replayed(operation, arguments, keywords)


def unread(
    files: CheckpointFiles,
    quantization: Quantization | None = None,
    dtype: torch.dtype = torch.bfloat16,
    name: str = "the checkpoint",
) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint `name` by its key.

    The stored tensors of a quantised matrix become one tensor, the matrix in `dtype`. Only block indices are
    read. Raises CheckpointError if the tensors do not fit together.
    """
    stored = {item.key: Stored(files, item, item.shape, item.dtype) for item in files}
    decoded = {}
    if quantization is not None:
        matrices, skipped = quantized_matrices(quantization, files.tensors, name)
        for key in skipped:
            del stored[key]
        for key, matrix in matrices.items():
            parts = {role: stored.pop(stored_key) for role, stored_key in matrix.keys.items()}
            decoded[key] = Decoded.of(matrix.layout, parts, matrix.shape, dtype)
        files.close()
    recipes: dict[str, Recipe] = {**stored, **decoded}
    return {key: UnreadTensor(recipe) for key, recipe in recipes.items()}


def _special(operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of an operation whose result can be read in parts; None for other operations."""
    first = arguments[0]
    if operation is _aten._to_copy.default:
        options = {key for key, value in keywords.items() if value is not None} - {"dtype", "device", "non_blocking"}
        is_plain = not options and keywords.get("device") in (None, torch.device("cpu"))
        dtype = keywords.get("dtype") or first.dtype
        if dtype.is_floating_point and not first.dtype.is_floating_point:
            # Only a quantisation defines the weights that integers stand for.
            tensor = next(first.stored()).tensor
            text = f"{tensor.file}: {tensor.key} is {first.dtype}; expected floating-point numbers"
            raise CheckpointError(text, name=tensor.key, value=first.dtype, path=tensor.file)
        return Converted(first, dtype) if is_plain else None
    if operation is _aten.slice.Tensor:
        return _sliced(first, *arguments[1:])
    if operation not in (_aten.stack.default, _aten.cat.default):
        return None
    parts = tuple(first)
    dim = arguments[1] if len(arguments) > 1 else keywords.get("dim", 0)
    if not all(isinstance(item, Recipe) and item.dtype == parts[0].dtype for item in parts):
        return None
    shape = parts[0].shape
    if operation is _aten.stack.default:
        same = all(item.shape == shape for item in parts)
        return Stacked(parts, (len(parts), *shape), parts[0].dtype) if same and dim % (len(shape) + 1) == 0 else None
    if not shape or any(len(item.shape) != len(shape) for item in parts) or dim % len(shape) == 0:
        return None
    dim %= len(shape)
    if len({(item.shape[:dim], item.shape[dim + 1 :]) for item in parts}) > 1:
        return None
    joined = (*shape[:dim], sum(item.shape[dim] for item in parts), *shape[dim + 1 :])
    return Joined(parts, dim, joined, parts[0].dtype)


def _sliced(
    source: Recipe, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Recipe | None:
    if dim == 0 and step == 1:
        first, end, _ = slice(start, stop).indices(source.shape[0])
        with contextlib.suppress(UnfollowedError):  # otherwise read the whole tensor and slice it
            return source.rows(first, max(first, end))
    return None


def _replayed(operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the outputs of any other operation, with shapes, dtypes and errors from a run on the meta device."""

    def shell(recipe: Recipe) -> torch.Tensor:
        return torch.empty(recipe.shape, dtype=recipe.dtype, device="meta")

    on_meta = {key: value for key, value in keywords.items() if key != "device"}
    positional, on_meta = tree_map_only(Recipe, shell, (arguments, on_meta))
    result = operation(*positional, **on_meta)

    def wrap(made: Any, output: int | None) -> UnreadTensor:
        return UnreadTensor(Replayed(operation, arguments, keywords, output, tuple(made.shape), made.dtype))

    if isinstance(result, (list, tuple)):
        return [wrap(made, number) for number, made in enumerate(result)]
    return wrap(result, None)
