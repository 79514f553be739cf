"""Read masks of one-hot vectors: of each token, the few places that are not zero, and what stands there.

A mask as [tokens, experts, capacity] is written as products and sums of comparisons with 0, 1, 2, ..:

    mask[s, e, c] = sum over k of weight_k[s] * (e == expert_k[s]) * (c == place_k[s])

Weights and places are numbers of a token. They are followed through products, sums, casts and views, and written as
tensors [tokens, k]: a few numbers where the mask has thousands of zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.pair_layouts import is_counting
from moepass.passes.graph.graph_writer import GraphWriter
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments, fill_number, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.rows.row_layout import regrouped

aten, prims = torch.ops.aten, torch.ops.prims

_FOLLOWED = (Trait.CAST, Trait.COPY, Trait.PERMUTE, Trait.RESHAPE, Trait.EXPAND, Trait.AND)
# Places of a token are compared with each other.
_MOST_PLACES = 8


@dataclasses.dataclass(frozen=True)
class MaskPart:
    """A dimension of a mask, or a factor of one: `size`, a number or a node, of tokens, or ones at `index` [tokens, k].

    Every index is below the size.
    """

    size: Any
    index: Node | None = None

    @property
    def is_tokens(self) -> bool:
        return self.index is None


Dimension = tuple[MaskPart, ...]


@dataclasses.dataclass(frozen=True)
class OneHots:
    """A mask. Its dimensions of one element have no parts. `weight` [tokens, k] is zero where a token has no place.

    `are_distinct`: no two places of a token with weights that are not zero are the same. `is_exact`: the mask was added
    up in the order of k. `are_truths`: weights are 0 or 1.
    """

    dimensions: tuple[Dimension, ...]
    weight: Node
    are_distinct: bool = True
    is_exact: bool = True
    are_truths: bool = True

    @property
    def places(self) -> int:
        return int(fake_value(self.weight).shape[1])

    @property
    def parts(self) -> list[MaskPart]:
        return [part for dimension in self.dimensions for part in dimension]


def possible_masks(graph: Graph) -> set[Node]:
    """The nodes that `MaskReader` may be able to read."""
    found: set[Node] = set()
    for node in graph.nodes:
        base = base_operation(node)
        if node.op != "call_function" or not isinstance(fake_value(node), torch.Tensor):
            continue
        masks = [used for used in node.all_input_nodes if used in found]
        if base == "eq":
            is_mask = is_call(node, aten.eq.Tensor) and any(_counting_dim(used) is not None for used in node.args)
        elif base == "add":
            others = [used for used in node.all_input_nodes if used not in found]
            is_mask = bool(masks) and all(fill_number(used) == 0 for used in others)
        else:
            is_mask = bool(masks) and (has_trait(node, *_FOLLOWED) or base in ("ne", "gt"))
        if is_mask:
            found.add(node)
    return found


class MaskReader:
    """Writes what masks say. Raises NotThisForm where one of them is no mask of one-hot vectors."""

    def __init__(self, writer: GraphWriter, masks: set[Node]) -> None:
        self.writer = writer
        self._masks = masks
        self._known: dict[Node, OneHots] = {}

    def read(self, node: Node) -> OneHots:
        if node not in self._known:
            self._known[node] = found = self._read(node)
            if fake_value(found.weight).dtype != fake_value(node).dtype:
                self._refuse(node, "gives another type than its factors")
        return self._known[node]

    def _read(self, node: Node) -> OneHots:
        base, given = base_operation(node), all_arguments(node)
        if base == "eq":
            return self._compared(node)
        if base == "add":
            return self._sum(node, given)
        if has_trait(node, Trait.AND):
            return self._product(node, given)
        source = node.all_input_nodes[0]
        mask = self.read(source)
        if has_trait(node, Trait.CAST):
            return self._cast(node, mask)
        if base in ("ne", "gt"):
            if given["other"] != 0:
                self._refuse(node, "compares a mask with something other than 0")
            return self._truths(node, mask, node.target)
        if has_trait(node, Trait.PERMUTE):
            return dataclasses.replace(mask, dimensions=tuple(mask.dimensions[dim] for dim in permutation(node)))
        if base == "expand" and not _same_sizes(node, source):
            self._refuse(node, "repeats a mask")
        if has_trait(node, Trait.RESHAPE):
            return dataclasses.replace(mask, dimensions=self._regrouped(node, mask.parts))
        return mask

    # ------------------------------------------------------------------------------------------------------- leaves

    def _compared(self, node: Node) -> OneHots:
        """Numbers of tokens compared with 0, 1, 2, ..: one-hot vectors."""
        left, right = node.args
        counting, numbers = (right, left) if _counting_dim(right) is not None else (left, right)
        assert isinstance(counting, Node)
        assert isinstance(numbers, Node)
        dims = fake_value(node).dim()
        behind = fake_value(counting).dim() - (_counting_dim(counting) or 0)
        value = fake_value(numbers)
        of_tokens = [value.dim() - dim for dim in range(value.dim()) if not _is_one(value.shape[dim])]
        if len(of_tokens) != 1 or of_tokens[0] == behind or value.dtype not in (torch.int32, torch.int64):
            self._refuse(node, "compares something other than one whole number of each token with 0, 1, 2, ..")
        writer = self.writer
        size = writer.size(counting, _counting_dim(counting) or 0)
        tokens = writer.size(numbers, value.dim() - of_tokens[0])
        if _is_one(size) or _is_one(tokens):
            self._refuse(node, "has a single token, or a single place")
        index = writer.viewed(numbers, [tokens, 1])
        if value.dtype is not torch.int64:
            index = writer.emit(prims.convert_element_type.default, index, torch.int64)
        is_there = writer.emit(
            aten.bitwise_and.Tensor,
            writer.emit(aten.ge.Scalar, index, 0),
            writer.emit(aten.lt.Scalar, index, size),
        )
        index = writer.emit(aten.where.self, is_there, index, self._number(0, index))
        dimensions: list[Dimension] = [() for _ in range(dims)]
        dimensions[dims - behind] = (MaskPart(size, index),)
        dimensions[dims - of_tokens[0]] = (MaskPart(tokens),)
        return OneHots(tuple(dimensions), is_there)

    def _number(self, number: float, like: Node) -> Node:
        value = fake_value(like)
        return self.writer.emit(aten.scalar_tensor.default, number, dtype=value.dtype, device=value.device)

    # ------------------------------------------------------------------------------------------------ sums, products

    def _sum(self, node: Node, given: dict[str, Any]) -> OneHots:
        terms = [given["self"], given["other"]]
        if given.get("alpha", 1) != 1 or not all(isinstance(term, Node) for term in terms):
            self._refuse(node, "adds something else to a mask")
        if fake_value(node).dtype is torch.bool:
            self._refuse(node, "adds truths")
        if not all(_same_sizes(node, term) and fake_value(term).dtype == fake_value(node).dtype for term in terms):
            self._refuse(node, "adds masks of other sizes or types")
        masks = [self.read(term) for term in terms if term in self._masks]
        if len(masks) == 1:
            return masks[0]
        first, second = masks if masks[1].are_distinct else masks[::-1]
        if not _are_alike(first, second):
            self._refuse(node, "adds masks of other dimensions")
        # In the order of the sum, if only one of them was a sum before.
        is_exact = first.is_exact and second.is_exact and second.are_distinct
        writer = self.writer
        dimensions = tuple(
            tuple(
                left
                if left.index is None
                else MaskPart(left.size, writer.emit(aten.cat.default, [left.index, right.index], 1))
                for left, right in zip(*both, strict=True)
            )
            for both in zip(first.dimensions, second.dimensions, strict=True)
        )
        weight = writer.emit(aten.cat.default, [first.weight, second.weight], 1)
        return OneHots(dimensions, weight, are_distinct=False, is_exact=is_exact, are_truths=False)

    def _product(self, node: Node, given: dict[str, Any]) -> OneHots:
        factors = [given["self"], given["other"]]
        masks = [factor for factor in factors if factor in self._masks]
        if len(masks) == 2:
            return self._product_of_masks(node, *map(self.read, masks))
        (mask,) = map(self.read, masks)
        (other,) = [factor for factor in factors if factor not in self._masks]
        picked = self._picked(node, mask, other) if isinstance(other, Node) else other
        weight = self.writer.emit(node.target, mask.weight, picked)  # type: ignore[arg-type]
        stay = mask.are_truths and isinstance(other, Node) and fake_value(other).dtype is torch.bool
        return dataclasses.replace(mask, weight=weight, is_exact=mask.are_distinct, are_truths=stay)

    def _picked(self, node: Node, mask: OneHots, other: Node) -> Node:
        """What `other` has where the ones of `mask` are: [tokens, k], or one of these 1."""
        value, writer = fake_value(other), self.writer
        dims = len(mask.dimensions)
        if value.dim() > dims or not isinstance(value, torch.Tensor):
            self._refuse(node, "has more dimensions than the mask")
        sizes: list[Any] = []
        indices: list[Node] = []
        for dim in range(value.dim()):
            if _is_one(value.shape[dim]):
                continue
            parts = mask.dimensions[dims - value.dim() + dim]
            if len(parts) != 1 or size_expression(parts[0].size) != size_expression(value.shape[dim]):
                self._refuse(node, "multiplies a mask along a dimension that it does not have")
            (part,) = parts
            sizes.append(part.size)
            indices.append(self._every_token(part.size, other) if part.index is None else part.index)
        if not indices:
            return writer.viewed(other, [1, 1])
        return writer.emit(aten.index.Tensor, writer.viewed(other, sizes), indices)

    def _every_token(self, tokens: Any, like: Node) -> Node:
        return self.writer.emit(aten.unsqueeze.default, self.writer.arange(tokens, fake_value(like).device), 1)

    def _product_of_masks(self, node: Node, left: OneHots, right: OneHots) -> OneHots:
        writer = self.writer
        more, fewer = (left, right) if left.places >= right.places else (right, left)
        if fewer.places != 1:
            self._refuse(node, "multiplies two sums of masks")
        weight = writer.emit(node.target, more.weight, fewer.weight)  # type: ignore[arg-type]
        dimensions: list[Dimension] = []
        dims = max(len(more.dimensions), len(fewer.dimensions))
        for one, other in zip(_padded(more, dims), _padded(fewer, dims), strict=True):
            if not one or not other:
                dimensions.append(one or tuple(self._spread(part, more) for part in other))
                continue
            if len(one) != 1 or len(other) != 1 or one[0].is_tokens != other[0].is_tokens:
                self._refuse(node, "multiplies masks of other dimensions")
            dimensions.append(one)
            if one[0].index is not None:
                assert other[0].index is not None
                same = writer.emit(aten.eq.Tensor, one[0].index, other[0].index)
                weight = writer.emit(aten.where.self, same, weight, self._number(0, weight))
        if sum(part.is_tokens for dimension in dimensions for part in dimension) != 1:
            self._refuse(node, "multiplies masks of other tokens")
        return OneHots(
            tuple(dimensions), weight, more.are_distinct, more.are_distinct, more.are_truths and fewer.are_truths
        )

    def _spread(self, part: MaskPart, more: OneHots) -> MaskPart:
        """A part with one place of each token, as often as `more` has places."""
        if part.index is None or more.places == 1:
            return part
        tokens = self.writer.size(part.index, 0)
        return MaskPart(part.size, self.writer.emit(aten.expand.default, part.index, [tokens, more.places]))

    # -------------------------------------------------------------------------------------------------------- types

    def _cast(self, node: Node, mask: OneHots) -> OneHots:
        dtype, old = fake_value(node).dtype, fake_value(mask.weight).dtype
        given = {name: value for name, value in all_arguments(node).items() if value is not None}
        others = {"pin_memory", "non_blocking", "layout", "device", "memory_format"}
        if given.keys() - {"self", "a", "dtype", *others} or fake_value(node).device != fake_value(mask.weight).device:
            self._refuse(node, "moves a mask")
        if dtype is torch.bool and old is not torch.bool:
            return self._truths(node, mask, aten.ne.Scalar)
        if not mask.are_distinct and not (dtype.is_floating_point and old.is_floating_point):
            self._refuse(node, "rounds a sum of masks to whole numbers")
        if dtype == old:
            return mask
        weight = self.writer.emit(prims.convert_element_type.default, mask.weight, dtype)
        return dataclasses.replace(mask, weight=weight, is_exact=mask.are_distinct)

    def _truths(self, node: Node, mask: OneHots, compare: Any) -> OneHots:
        """Where a mask is not zero, or above it: each place of a token once, the first time that it has it."""
        writer = self.writer
        if mask.are_distinct:
            truths = writer.emit(compare, mask.weight, 0)
            return dataclasses.replace(mask, weight=truths, is_exact=True, are_truths=True)
        if not mask.is_exact or mask.places > _MOST_PLACES:
            self._refuse(node, "depends on the order in which a mask was added up")
        weights = [writer.emit(aten.slice.Tensor, mask.weight, 1, k, k + 1) for k in range(mask.places)]
        same = self._same_places(mask)
        of_places: list[Node] = []
        for place in range(mask.places):
            terms = list(weights)
            for other in range(mask.places):
                if other != place:
                    pair = same[min(place, other), max(place, other)]
                    terms[other] = writer.emit(aten.where.self, pair, weights[other], self._number(0, weights[other]))
            total = functools.reduce(lambda left, right: writer.emit(aten.add.Tensor, left, right), terms)
            truth = writer.emit(compare, total, 0)
            for before in range(place):
                is_other = writer.emit(aten.bitwise_not.default, same[before, place])
                truth = writer.emit(aten.bitwise_and.Tensor, truth, is_other)
            of_places.append(truth)
        return OneHots(mask.dimensions, writer.emit(aten.cat.default, of_places, 1))

    def _same_places(self, mask: OneHots) -> dict[tuple[int, int], Node]:
        """For each two places of a token whether they are the same: [tokens, 1]."""
        writer, same = self.writer, dict[tuple[int, int], Node]()
        indices = [part.index for part in mask.parts if part.index is not None]
        columns = [[writer.emit(aten.slice.Tensor, one, 1, k, k + 1) for k in range(mask.places)] for one in indices]
        for pair in itertools.combinations(range(mask.places), 2):
            found = [writer.emit(aten.eq.Tensor, *(column[place] for place in pair)) for column in columns]
            same[pair] = functools.reduce(lambda left, right: writer.emit(aten.bitwise_and.Tensor, left, right), found)
        return same

    def _regrouped(self, node: Node, parts: list[MaskPart]) -> tuple[Dimension, ...]:
        """The same parts in the dimensions of another shape."""
        dimensions = regrouped(parts, lambda part: part.size, fake_value(node).shape)
        if dimensions is None:
            self._refuse(node, "cuts a dimension of a mask")
        return tuple(dimensions)

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"{named(node)} {what}")


def _counting_dim(node: Any) -> int | None:
    """The dimension along which `node` counts 0, 1, 2, ..; all others have one element. None where it does not."""
    if not isinstance(node, Node) or not isinstance(value := fake_value(node), torch.Tensor) or value.dim() == 0:
        return None
    dims = [dim for dim in range(value.dim()) if not _is_one(value.shape[dim])]
    return dims[0] if len(dims) == 1 and is_counting(node) else None


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _same_sizes(left: Node, right: Node) -> bool:
    sizes: list[Sequence[Any]] = [fake_value(node).shape for node in (left, right)]
    return [*map(size_expression, sizes[0])] == [*map(size_expression, sizes[1])]


def _padded(mask: OneHots, dims: int) -> tuple[Dimension, ...]:
    return ((),) * (dims - len(mask.dimensions)) + mask.dimensions


def _are_alike(left: OneHots, right: OneHots) -> bool:
    """The same dimensions, wherever the ones are."""
    kinds = [
        [[(part.is_tokens, size_expression(part.size)) for part in dimension] for dimension in mask.dimensions]
        for mask in (left, right)
    ]
    return kinds[0] == kinds[1]
