"""The stored tensors of quantised experts, kept as they are stored, and the parts of the weights that they decode into.

Joined([Stacked(Decoded gates), Stacked(Decoded ups)], dim=1)   the weight [experts, 2h, H] of transformers
-->  rows [0, h) from the values and scales of all gates, rows [h, 2h) from those of all ups
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import (
    Converted,
    Decoded,
    InMemory,
    Joined,
    Recipe,
    Replayed,
    Stacked,
    Stored,
    UnfollowedError,
)
from moepass.models.layouts.layout import Role
from moepass.models.layouts.packed_floats import PackedFormula
from moepass.models.layouts.weight_layout import Formula

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class MatrixPart:
    """Indices [start, stop) of dimension `dim` of a weight, and the stored tensors that they decode from.

    Attributes:
        layout: name of the layout; empty if the values are not quantised.
        formula: None if the values are not quantised.
        stored: recipes of the stored tensors; of a weight [experts, ...], each is [experts, ...] too.
    """

    dim: int
    start: int
    stop: int
    layout: str
    formula: Formula | None
    stored: Mapping[Role, Recipe]

    @property
    def structure(self) -> object:
        """Everything but the stored values, which must be equal for all experts."""
        stored = {role: (recipe.shape, recipe.dtype) for role, recipe in self.stored.items()}
        return dataclasses.replace(self, stored={}), stored


def bank_parts(tensors: Mapping[str, torch.Tensor]) -> list[list[MatrixPart]] | None:
    """Return the parts of each tensor [experts, ...] of a bank; None if no tensor is quantised.

    Raises UnfollowedError if quantised weights cannot be kept as they are stored, because a conversion changes them.
    """
    recipes = [tensor.recipe for tensor in tensors.values() if isinstance(tensor, UnreadTensor)]
    if len(recipes) < len(tensors) or not any(_is_quantized(recipe) for recipe in recipes):
        return None
    return [stored_parts(recipe) for recipe in recipes]


def stored_parts(recipe: Recipe) -> list[MatrixPart]:
    """Return the parts that make up the tensor of `recipe`. Raises UnfollowedError at an operation without a rule."""
    if isinstance(recipe, (Stored, InMemory)):
        return [MatrixPart(0, 0, recipe.shape[0] if recipe.shape else 1, "", None, {Role.VALUES: recipe})]
    if isinstance(recipe, Decoded):
        formula = recipe.layout.formula
        if isinstance(formula, PackedFormula) and formula.type.dtype != recipe.dtype:
            # The bank would be larger than in `recipe.dtype`, and its decoder slow.
            raise UnfollowedError(f"a conversion from {formula.type.dtype} to {recipe.dtype}")
        return [MatrixPart(0, 0, recipe.shape[0], recipe.layout.name, formula, recipe.parts)]
    if isinstance(recipe, Stacked):
        return list(_stacked([stored_parts(item) for item in recipe.parts]))
    if isinstance(recipe, Joined):
        return list(_joined(recipe))
    if isinstance(recipe, Converted):
        parts = stored_parts(recipe.source)
        # Values that are decoded or converted before would be rounded twice.
        is_plain = all(part.stored[Role.VALUES].dtype == recipe.source.dtype for part in parts)
        if recipe.dtype == recipe.source.dtype or is_plain:
            return parts
        raise UnfollowedError(f"a conversion from {recipe.source.dtype} to {recipe.dtype}")
    if isinstance(recipe, Replayed) and isinstance(recipe.arguments[0], Recipe):
        if recipe.operation is _aten.clone.default:
            return stored_parts(recipe.arguments[0])
        dims = len(recipe.shape)
        swapped = {dim % dims for dim in recipe.arguments[1:]} if recipe.operation is _aten.transpose.int else set()
        if swapped == {dims - 2, dims - 1}:
            return [_transposed(part, dims) for part in stored_parts(recipe.arguments[0])]
    raise UnfollowedError(recipe.operation_name)


def _is_quantized(recipe: Recipe) -> bool:
    return isinstance(recipe, Decoded) or any(_is_quantized(source) for source in recipe.sources())


def _stacked(parts_of_experts: Sequence[list[MatrixPart]]) -> Iterator[MatrixPart]:
    for parts in zip(*parts_of_experts, strict=True):
        first = parts[0]
        if any(part.structure != first.structure for part in parts):
            raise UnfollowedError("a stack of experts that are stored in different ways")
        stored = {
            role: Stacked(tuple(part.stored[role] for part in parts), (len(parts), *recipe.shape), recipe.dtype)
            for role, recipe in first.stored.items()
        }
        yield dataclasses.replace(first, dim=first.dim + 1, stored=stored)


def _joined(recipe: Joined) -> Iterator[MatrixPart]:
    offset = 0
    for source in recipe.parts:
        size = source.shape[recipe.dim]
        parts = stored_parts(source)
        for part in parts:
            if part.dim == recipe.dim:
                yield dataclasses.replace(part, start=offset + part.start, stop=offset + part.stop)
            elif len(parts) == 1:
                yield dataclasses.replace(part, dim=recipe.dim, start=offset, stop=offset + size)
            else:
                raise UnfollowedError(f"cat along dimensions {part.dim} and {recipe.dim}")
        offset += size


def _transposed(part: MatrixPart, dims: int) -> MatrixPart:
    if part.formula is None:
        raise UnfollowedError("transpose")
    formula = msgspec.structs.replace(part.formula, is_transposed=not part.formula.is_transposed)
    swapped = {dims - 1: dims - 2, dims - 2: dims - 1}
    return dataclasses.replace(part, dim=swapped.get(part.dim, part.dim), formula=formula)
