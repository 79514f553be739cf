"""Read one-hot masks: the few entries of each token that may be nonzero, with their weights and indices.

A mask [tokens, experts, capacity] is computed by products and sums of comparisons with 0, 1, 2, ..:

    mask[s, e, c] = sum over k of weight_k[s] * (e == expert_k[s]) * (c == slot_k[s])

Weights and indices are followed through products, sums, casts and views, and written as tensors [tokens, k]: a few
numbers in place of thousands of zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.pair_layouts import is_broadcast_arange
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
# Limit, because all pairs of a token's entries are compared.
_MOST_ENTRIES = 8


@dataclasses.dataclass(frozen=True)
class MaskFactor:
    """A factor of a dimension: `size` tokens, or `size` positions of which `index` [tokens, k] selects one per entry.

    `size` is a number or a node; every index is less than it.
    """

    size: Any
    index: Node | None = None

    @property
    def is_tokens(self) -> bool:
        return self.index is None


Dimension = tuple[MaskFactor, ...]


@dataclasses.dataclass(frozen=True)
class OneHots:
    """A mask; dimensions of size 1 have no factors. `weight` [tokens, k] is zero for an entry that is missing.

    `are_distinct`: a token's entries with nonzero weights have different indices. `is_exact`: the mask was summed in
    the order of k. `is_boolean`: weights are 0 or 1.
    """

    dimensions: tuple[Dimension, ...]
    weight: Node
    are_distinct: bool = True
    is_exact: bool = True
    is_boolean: bool = True

    @property
    def entries(self) -> int:
        return int(fake_value(self.weight).shape[1])

    @property
    def factors(self) -> list[MaskFactor]:
        return [factor for dimension in self.dimensions for factor in dimension]


def possible_masks(graph: Graph) -> set[Node]:
    """Return the nodes that `MaskReader` may be able to read."""
    candidates: set[Node] = set()
    for node in graph.nodes:
        base = base_operation(node)
        if node.op != "call_function" or not isinstance(fake_value(node), torch.Tensor):
            continue
        masks = [used for used in node.all_input_nodes if used in candidates]
        if base == "eq":
            is_mask = is_call(node, aten.eq.Tensor) and any(_arange_dim(used) is not None for used in node.args)
        elif base == "add":
            addends = [used for used in node.all_input_nodes if used not in candidates]
            is_mask = bool(masks) and all(fill_number(used) == 0 for used in addends)
        else:
            is_mask = bool(masks) and (has_trait(node, *_FOLLOWED) or base in ("ne", "gt"))
        if is_mask:
            candidates.add(node)
    return candidates


class MaskReader:
    """A reader of masks, which writes their weights and indices. Raises NotThisForm for masks of other forms."""

    def __init__(self, writer: GraphWriter, masks: set[Node]) -> None:
        self.writer = writer
        self._masks = masks
        self._read_masks: dict[Node, OneHots] = {}

    def read(self, node: Node) -> OneHots:
        if node not in self._read_masks:
            self._read_masks[node] = mask = self._read(node)
            if fake_value(mask.weight).dtype != fake_value(node).dtype:
                self._refuse(node, "has another type than its factors")
        return self._read_masks[node]

    def _read(self, node: Node) -> OneHots:
        base, arguments = base_operation(node), all_arguments(node)
        if base == "eq":
            return self._compared(node)
        if base == "add":
            return self._sum(node, arguments)
        if has_trait(node, Trait.AND):
            return self._product(node, arguments)
        source = node.all_input_nodes[0]
        mask = self.read(source)
        if has_trait(node, Trait.CAST):
            return self._cast(node, mask)
        if base in ("ne", "gt"):
            if arguments["other"] != 0:
                self._refuse(node, "compares a mask with something other than 0")
            return self._nonzero(node, mask, node.target)
        if has_trait(node, Trait.PERMUTE):
            return dataclasses.replace(mask, dimensions=tuple(mask.dimensions[dim] for dim in permutation(node)))
        if base == "expand" and not _same_sizes(node, source):
            self._refuse(node, "repeats a mask")
        if has_trait(node, Trait.RESHAPE):
            return dataclasses.replace(mask, dimensions=self._regrouped(node, mask.factors))
        return mask

    def _compared(self, node: Node) -> OneHots:
        """Read a comparison of one integer per token with 0, 1, 2, ..: one-hot vectors."""
        left, right = node.args
        arange, numbers = (right, left) if _arange_dim(right) is not None else (left, right)
        assert isinstance(arange, Node)
        assert isinstance(numbers, Node)
        dims = fake_value(node).dim()
        arange_offset = fake_value(arange).dim() - (_arange_dim(arange) or 0)
        value = fake_value(numbers)
        offsets = [value.dim() - dim for dim in range(value.dim()) if not _is_one(value.shape[dim])]
        if len(offsets) != 1 or offsets[0] == arange_offset or value.dtype not in (torch.int32, torch.int64):
            self._refuse(node, "compares something other than one integer per token with 0, 1, 2, ..")
        writer = self.writer
        size = writer.size(arange, _arange_dim(arange) or 0)
        tokens = writer.size(numbers, value.dim() - offsets[0])
        if _is_one(size) or _is_one(tokens):
            self._refuse(node, "has a single token, or a single index")
        index = writer.viewed(numbers, [tokens, 1])
        if value.dtype is not torch.int64:
            index = writer.emit(prims.convert_element_type.default, index, torch.int64)
        is_valid = writer.emit(
            aten.bitwise_and.Tensor, writer.emit(aten.ge.Scalar, index, 0), writer.emit(aten.lt.Scalar, index, size)
        )
        index = writer.emit(aten.where.self, is_valid, index, self._number(0, index))
        dimensions: list[Dimension] = [() for _ in range(dims)]
        dimensions[dims - arange_offset] = (MaskFactor(size, index),)
        dimensions[dims - offsets[0]] = (MaskFactor(tokens),)
        return OneHots(tuple(dimensions), is_valid)

    def _number(self, number: float, like: Node) -> Node:
        value = fake_value(like)
        return self.writer.emit(aten.scalar_tensor.default, number, dtype=value.dtype, device=value.device)

    def _sum(self, node: Node, arguments: dict[str, Any]) -> OneHots:
        terms = [arguments["self"], arguments["other"]]
        if arguments.get("alpha", 1) != 1 or not all(isinstance(term, Node) for term in terms):
            self._refuse(node, "adds something else to a mask")
        if fake_value(node).dtype is torch.bool:
            self._refuse(node, "adds boolean masks")
        if not all(_same_sizes(node, term) and fake_value(term).dtype == fake_value(node).dtype for term in terms):
            self._refuse(node, "adds masks of other sizes or types")
        masks = [self.read(term) for term in terms if term in self._masks]
        if len(masks) == 1:
            return masks[0]
        first, second = masks if masks[1].are_distinct else masks[::-1]
        if not _have_equal_dimensions(first, second):
            self._refuse(node, "adds masks of other dimensions")
        # The order of the sum is kept only if at most one term was a sum before.
        is_exact = first.is_exact and second.is_exact and second.are_distinct
        writer = self.writer
        dimensions = tuple(
            tuple(
                left
                if left.index is None
                else MaskFactor(left.size, writer.emit(aten.cat.default, [left.index, right.index], 1))
                for left, right in zip(*both, strict=True)
            )
            for both in zip(first.dimensions, second.dimensions, strict=True)
        )
        weight = writer.emit(aten.cat.default, [first.weight, second.weight], 1)
        return OneHots(dimensions, weight, are_distinct=False, is_exact=is_exact, is_boolean=False)

    def _product(self, node: Node, arguments: dict[str, Any]) -> OneHots:
        factors = [arguments["self"], arguments["other"]]
        masks = [factor for factor in factors if factor in self._masks]
        if len(masks) == 2:
            return self._product_of_masks(node, *map(self.read, masks))
        (mask,) = map(self.read, masks)
        (scale,) = [factor for factor in factors if factor not in self._masks]
        scales = self._values_at_entries(node, mask, scale) if isinstance(scale, Node) else scale
        weight = self.writer.emit(node.target, mask.weight, scales)  # type: ignore[arg-type]
        is_boolean = mask.is_boolean and isinstance(scale, Node) and fake_value(scale).dtype is torch.bool
        return dataclasses.replace(mask, weight=weight, is_exact=mask.are_distinct, is_boolean=is_boolean)

    def _values_at_entries(self, node: Node, mask: OneHots, scale: Node) -> Node:
        """Return the elements of `scale` at the entries of `mask`, in a shape that broadcasts to [tokens, k]."""
        value, writer = fake_value(scale), self.writer
        dims = len(mask.dimensions)
        if value.dim() > dims or not isinstance(value, torch.Tensor):
            self._refuse(node, "has more dimensions than the mask")
        sizes: list[Any] = []
        indices: list[Node] = []
        for dim in range(value.dim()):
            if _is_one(value.shape[dim]):
                continue
            factors = mask.dimensions[dims - value.dim() + dim]
            if len(factors) != 1 or size_expression(factors[0].size) != size_expression(value.shape[dim]):
                self._refuse(node, "multiplies a mask along a dimension that it does not have")
            (factor,) = factors
            sizes.append(factor.size)
            indices.append(self._token_indices(factor.size, scale) if factor.index is None else factor.index)
        if not indices:
            return writer.viewed(scale, [1, 1])
        return writer.emit(aten.index.Tensor, writer.viewed(scale, sizes), indices)

    def _token_indices(self, tokens: Any, like: Node) -> Node:
        return self.writer.emit(aten.unsqueeze.default, self.writer.arange(tokens, fake_value(like).device), 1)

    def _product_of_masks(self, node: Node, left: OneHots, right: OneHots) -> OneHots:
        writer = self.writer
        more, fewer = (left, right) if left.entries >= right.entries else (right, left)
        if fewer.entries != 1:
            self._refuse(node, "multiplies two sums of masks")
        weight = writer.emit(node.target, more.weight, fewer.weight)  # type: ignore[arg-type]
        dimensions: list[Dimension] = []
        dims = max(len(more.dimensions), len(fewer.dimensions))
        for wide, narrow in zip(_padded(more, dims), _padded(fewer, dims), strict=True):
            if not wide or not narrow:
                dimensions.append(wide or tuple(self._repeat_index(factor, more) for factor in narrow))
                continue
            if len(wide) != 1 or len(narrow) != 1 or wide[0].is_tokens != narrow[0].is_tokens:
                self._refuse(node, "multiplies masks of other dimensions")
            dimensions.append(wide)
            if wide[0].index is not None:
                assert narrow[0].index is not None
                same = writer.emit(aten.eq.Tensor, wide[0].index, narrow[0].index)
                weight = writer.emit(aten.where.self, same, weight, self._number(0, weight))
        if sum(factor.is_tokens for dimension in dimensions for factor in dimension) != 1:
            self._refuse(node, "multiplies masks of other tokens")
        return OneHots(
            tuple(dimensions), weight, more.are_distinct, more.are_distinct, more.is_boolean and fewer.is_boolean
        )

    def _repeat_index(self, factor: MaskFactor, more: OneHots) -> MaskFactor:
        """Repeat the index of one entry per token for all entries of `more`."""
        if factor.index is None or more.entries == 1:
            return factor
        tokens = self.writer.size(factor.index, 0)
        return MaskFactor(factor.size, self.writer.emit(aten.expand.default, factor.index, [tokens, more.entries]))

    def _cast(self, node: Node, mask: OneHots) -> OneHots:
        dtype, old = fake_value(node).dtype, fake_value(mask.weight).dtype
        values = {name: value for name, value in all_arguments(node).items() if value is not None}
        extra = {"pin_memory", "non_blocking", "layout", "device", "memory_format"}
        if values.keys() - {"self", "a", "dtype", *extra} or fake_value(node).device != fake_value(mask.weight).device:
            self._refuse(node, "moves a mask")
        if dtype is torch.bool and old is not torch.bool:
            return self._nonzero(node, mask, aten.ne.Scalar)
        if not mask.are_distinct and not (dtype.is_floating_point and old.is_floating_point):
            self._refuse(node, "rounds a sum of masks to integers")
        if dtype == old:
            return mask
        weight = self.writer.emit(prims.convert_element_type.default, mask.weight, dtype)
        return dataclasses.replace(mask, weight=weight, is_exact=mask.are_distinct)

    def _nonzero(self, node: Node, mask: OneHots, compare: Any) -> OneHots:
        """Compare the mask with 0; of several entries at the same indices, only the first remains."""
        writer = self.writer
        if mask.are_distinct:
            weight = writer.emit(compare, mask.weight, 0)
            return dataclasses.replace(mask, weight=weight, is_exact=True, is_boolean=True)
        if not mask.is_exact or mask.entries > _MOST_ENTRIES:
            self._refuse(node, "depends on the order in which a mask was added up")
        weights = [writer.emit(aten.slice.Tensor, mask.weight, 1, k, k + 1) for k in range(mask.entries)]
        same = self._equal_entries(mask)
        columns: list[Node] = []
        for entry in range(mask.entries):
            terms = list(weights)
            for peer in range(mask.entries):
                if peer != entry:
                    pair = same[min(entry, peer), max(entry, peer)]
                    terms[peer] = writer.emit(aten.where.self, pair, weights[peer], self._number(0, weights[peer]))
            total = functools.reduce(lambda left, right: writer.emit(aten.add.Tensor, left, right), terms)
            column = writer.emit(compare, total, 0)
            for before in range(entry):
                is_distinct = writer.emit(aten.bitwise_not.default, same[before, entry])
                column = writer.emit(aten.bitwise_and.Tensor, column, is_distinct)
            columns.append(column)
        return OneHots(mask.dimensions, writer.emit(aten.cat.default, columns, 1))

    def _equal_entries(self, mask: OneHots) -> dict[tuple[int, int], Node]:
        """Return for each pair of entries whether their indices are equal: [tokens, 1]."""
        writer, same = self.writer, dict[tuple[int, int], Node]()
        indices = [factor.index for factor in mask.factors if factor.index is not None]
        columns = [[writer.emit(aten.slice.Tensor, ids, 1, k, k + 1) for k in range(mask.entries)] for ids in indices]
        for pair in itertools.combinations(range(mask.entries), 2):
            equal = [writer.emit(aten.eq.Tensor, *(column[entry] for entry in pair)) for column in columns]
            same[pair] = functools.reduce(lambda left, right: writer.emit(aten.bitwise_and.Tensor, left, right), equal)
        return same

    def _regrouped(self, node: Node, factors: list[MaskFactor]) -> tuple[Dimension, ...]:
        dimensions = regrouped(factors, lambda factor: factor.size, fake_value(node).shape)
        if dimensions is None:
            self._refuse(node, "cuts a dimension of a mask")
        return tuple(dimensions)

    def _refuse(self, node: Node, what: str) -> NoReturn:
        raise NotThisForm(f"{named(node)} {what}")


def _arange_dim(node: Any) -> int | None:
    """Return the dimension along which `node` is 0, 1, 2, .. if all others have size 1, or None."""
    if not isinstance(node, Node) or not isinstance(value := fake_value(node), torch.Tensor) or value.dim() == 0:
        return None
    dims = [dim for dim in range(value.dim()) if not _is_one(value.shape[dim])]
    return dims[0] if len(dims) == 1 and is_broadcast_arange(node) else None


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _same_sizes(left: Node, right: Node) -> bool:
    sizes: list[Sequence[Any]] = [fake_value(node).shape for node in (left, right)]
    return [*map(size_expression, sizes[0])] == [*map(size_expression, sizes[1])]


def _padded(mask: OneHots, dims: int) -> tuple[Dimension, ...]:
    return ((),) * (dims - len(mask.dimensions)) + mask.dimensions


def _have_equal_dimensions(left: OneHots, right: OneHots) -> bool:
    kinds = [
        [[(factor.is_tokens, size_expression(factor.size)) for factor in dimension] for dimension in mask.dimensions]
        for mask in (left, right)
    ]
    return kinds[0] == kinds[1]
