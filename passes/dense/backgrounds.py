"""What values hold for the pairs of a token and an expert that a router did not choose.

A router's weights as a matrix [tokens, experts] are zero, or another constant, but for the k experts of each token:

    zeros.scatter(1, ids, weights)                      and with -inf, before a softmax or a sigmoid
    (one_hot(ids) * weights.unsqueeze(-1)).sum(1)       and as a product of both
    scores * mask, scores.masked_fill(~mask, 0)         where masks are written in these ways

The constant is followed through what is computed of them: an operation of constants is computed; 0 times anything is 0,
as is a product of rows of zeros with a matrix. That 0 times an infinite number would be none is left out: so a value
that is not finite stays with the pairs that were chosen.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Node

from moepass.passes.dense.dense_gemms import dense_gemm
from moepass.passes.dense.pair_layouts import Pairs, is_broadcast_arange, is_features, operand_layouts
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import constant_of, fake_value, is_call, map_nodes
from moepass.passes.ops.arguments import all_arguments, fill_number
from moepass.passes.ops.traits import Trait, base_operation, draws_random_numbers, has_trait, mutates
from moepass.passes.ops.walk import origin
from moepass.passes.rows.row_layout import Layout, features, size_of

aten = torch.ops.aten

Number = bool | int | float

_ABOUT_MEMORY = ("device", "pin_memory", "memory_format", "non_blocking")
_MOVES = (Trait.RESHAPE, Trait.PERMUTE, Trait.EXPAND, Trait.REPEAT, Trait.SLICE, Trait.COPY)


@dataclasses.dataclass(frozen=True)
class Background:
    """`number` everywhere but at the experts `ids` [places, k], or [places], of each place; without ids everywhere."""

    number: Number
    ids: Node | None = None

    @property
    def is_zero(self) -> bool:
        return self.number == 0


class Backgrounds:
    """Finds the backgrounds of values of one set of pairs."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._cache: dict[tuple[Node, Layout], Background | None] = {}

    def of(self, node: Node, layout: Layout) -> Background | None:
        """The background of `node`, in which experts and places lie as in `layout`; None where it has none."""
        key = (node, layout)
        if key not in self._cache:
            self._cache[key] = None  # no value is computed of itself
            self._cache[key] = self._find(node, layout)
        return self._cache[key]

    def _find(self, node: Node, layout: Layout) -> Background | None:
        if not isinstance(fake_value(node), torch.Tensor):
            return None
        constant = _constant(node)
        if constant is not None:
            return Background(constant)
        if node.op != "call_function" or mutates(node) or draws_random_numbers(node):
            return None
        base = base_operation(node)
        if base in ("scatter", "scatter_add"):
            return self._scattered(node, layout)
        if base == "eq" and (found := self._compared(node, layout)) is not None:
            return found
        gemm = dense_gemm(node)
        if gemm is not None and gemm.kind != "summed" and gemm.result_layout(self.pairs) == layout:
            return self._multiplied(gemm.rows, gemm.rows_layout(self.pairs), gemm.added, layout)
        if base in ("bmm", "mm"):
            return self._contracted(node, layout)
        if has_trait(node, Trait.SOFTMAX):
            return self._softmax(node, layout)
        found_sources = operand_layouts(node, layout, self.pairs)
        if found_sources is None:
            return None
        below = {used: self.of(used, one) for used, one in found_sources.items()}
        if has_trait(node, *_MOVES) or (base == "getitem" and has_trait(node.args[0], Trait.SPLIT)):
            return next(iter(below.values()))
        if has_trait(node, Trait.JOIN):
            return self._together(list(below.values()))
        if has_trait(node, Trait.REDUCE):
            return self._reduced(base, next(iter(below.values())))
        return self._elementwise(node, base, below, layout) if has_trait(node, Trait.ELEMENTWISE) else None

    # -------------------------------------------------------------------------------------------------------- leaves

    def _scattered(self, node: Node, layout: Layout) -> Background | None:
        """Something written to the experts of each place, into one number."""
        given = all_arguments(node)
        if given.get("reduce") is not None:
            return None
        into, index = self.of(given["self"], layout), given["index"]
        *front, last = layout.dimensions
        is_along_experts = given["dim"] % len(layout.dimensions) == len(front) and last == self.pairs.of_experts
        sizes = [size_expression(size) for size in fake_value(index).shape[:-1]]
        # Where there are fewer ids than places, the last places have no expert.
        if into is None or not is_along_experts or sizes != [size_of(dimension) for dimension in front]:
            return None
        ids = self._ids(index, [*front, ()])
        return None if ids is None or into.ids not in (None, ids) else Background(into.number, ids)

    def _compared(self, node: Node, layout: Layout) -> Background | None:
        """`ids.unsqueeze(-1) == arange(experts)`."""
        given = all_arguments(node)
        below = operand_layouts(node, layout, self.pairs) or {}
        for left, numbers in ((given["self"], given["other"]), (given["other"], given["self"])):
            if not isinstance(left, Node) or not is_broadcast_arange(numbers):
                continue
            if [one for one in below[numbers].dimensions if not is_features(one)] != [self.pairs.of_experts]:
                continue
            ids = self._ids(left, [one for one in below[left].dimensions if one])
            if ids is not None:
                return Background(False, ids)
        return None

    def _ids(self, node: Node, dimensions: list[Any]) -> Node | None:
        """The ids [places, k] of experts that a router chose, all different for each place, among which those of `node`
        are; its places lie in the first of `dimensions`, which are those of more than one element.
        """
        of_positions = [one for one in dimensions if not is_features(one)]
        front, layout = len(of_positions), Layout(tuple(of_positions))
        is_by_place = self.pairs.has_positions(layout) and not self.pairs.has_experts(layout)
        if not is_by_place or not self.pairs.are_complete(layout) or dimensions[:front] != of_positions:
            return None
        ids = _before_views(node, front)
        sizes = [size_expression(size) for size in fake_value(ids).shape[:front]]
        is_whole = fake_value(ids).dim() in (front, front + 1) and sizes == [size_of(one) for one in of_positions]
        return ids if is_whole and self._are_chosen(ids, front) else None

    def _are_chosen(self, ids: Node, dim: int) -> bool:
        """True where a top-k, or an argmax, of all experts gives `ids` along `dim`, which argmax may have left out."""
        chosen = ids.args[0] if is_call(ids, operator.getitem) and ids.args[1] == 1 else ids
        if not isinstance(chosen, Node) or chosen.op != "call_function":
            return False
        given = all_arguments(chosen)
        scores = given.get("self")
        if not isinstance(scores, Node) or given.get("dim") is None:
            return False
        value = fake_value(scores)
        is_over_experts = (
            given["dim"] % value.dim() == dim == value.dim() - 1 and value.shape[dim] == self.pairs.experts
        )
        is_top = is_call(chosen, aten.topk.default) and isinstance(given["k"], int)
        return bool(is_over_experts and (is_top or is_call(chosen, aten.argmax.default, aten.max.dim)))

    # ---------------------------------------------------------------------------------------------------- operations

    def _multiplied(self, rows: Node, layout: Layout, added: Any, result: Layout) -> Background | None:
        found = self.of(rows, layout)
        if found is None or not found.is_zero:
            return None
        if added is None:
            return Background(0, found.ids)
        # What is added is a background of zero, too.
        value = fake_value(added)
        of_added = result.dimensions[len(result.dimensions) - value.dim() :]
        other = self.of(added, Layout(tuple(_stretched(*pair) for pair in zip(of_added, value.shape, strict=True))))
        return None if other is None or not other.is_zero else self._joint(0, [found, other])

    def _contracted(self, node: Node, layout: Layout) -> Background | None:
        """A product that adds up something else than experts: of zeros, if one of its factors is."""
        given = all_arguments(node)
        left, right = given["self"], given["mat2"]
        batch = len(layout.dimensions) - 2
        *front, rows, columns = layout.dimensions
        summed = features(fake_value(left).shape[-1])
        of_left, of_right = Layout((*front, rows, summed)), Layout((*front, summed, columns))
        assert batch in (0, 1)
        for factor, one in ((left, of_left), (right, of_right)):
            if self.pairs.has_experts(one):
                found = self.of(factor, one)
                if found is not None and found.is_zero:
                    return Background(0, found.ids)
        return None

    def _softmax(self, node: Node, layout: Layout) -> Background | None:
        """Over experts, of -inf where none was chosen."""
        given = all_arguments(node)
        dim = given["dim"] % len(layout.dimensions)
        if layout.dimensions[dim] != self.pairs.of_experts:
            return None
        found = self.of(given["self"], layout)
        is_out = found is not None and found.ids is not None and found.number == -math.inf
        return Background(0, found.ids) if is_out and found is not None else None

    def _together(self, parts: list[Background | None]) -> Background | None:
        first = parts[0]
        if first is None or any(one is None or one.number != first.number for one in parts):
            return None
        return self._joint(first.number, parts)

    def _reduced(self, base: str, found: Background | None) -> Background | None:
        if found is None:
            return None
        is_same = base in ("amax", "amin", "any", "all") or (found.is_zero and base in ("sum", "mean", "prod"))
        return found if is_same else None

    def _elementwise(
        self, node: Node, base: str, below: dict[Node, Background | None], layout: Layout
    ) -> Background | None:
        given = all_arguments(node)
        if has_trait(node, Trait.AND):
            zero = next((one for one in below.values() if one is not None and one.is_zero), None)
            # 0 times what is infinite for every pair that was not chosen, as by a norm of zeros, spoils every token.
            is_spoiled = any(one is not None and not math.isfinite(one.number) for one in below.values())
            if zero is not None and not is_spoiled:
                return Background(_cast(0, node), zero.ids)
        if base == "div" and given.get("rounding_mode") is None:
            above = below.get(given["self"])
            if above is not None and above.is_zero and below.get(given["other"]) is None:
                return Background(0, above.ids)
        if base == "masked_fill" and isinstance(given["value"], (bool, int, float)):
            mask = below[given["mask"]]
            if mask is not None and mask.number:
                return Background(_cast(given["value"], node), mask.ids)
        if base == "where":
            condition = below.get(given["condition"])
            if condition is not None:
                taken = given["self"] if condition.number else given["other"]
                other = below.get(taken) if isinstance(taken, Node) else Background(taken)
                return None if other is None else self._joint(_cast(other.number, node), [condition, other])
        if base == "sub" and given["alpha"] == 1 and isinstance(given["other"], Node):
            # As a softmax is taken apart: what is largest is finite, or spoils those that were chosen too.
            out = below.get(given["self"])
            is_largest = self._is_largest(given["other"], given["self"], layout)
            if is_largest and out is not None and out.ids is not None and out.number == -math.inf:
                return out
        if any(one is None for one in below.values()):
            return None
        number = _computed(node, {used: one.number for used, one in below.items() if one is not None})
        return None if number is None else self._joint(number, list(below.values()))

    def _is_largest(self, node: Node, of: Node, layout: Layout) -> bool:
        """True for the largest number of all experts in `of`, which has `layout`."""
        if not is_call(node, aten.amax.default) or fake_value(of).dim() != len(layout.dimensions):
            return False
        given = all_arguments(node)
        return (
            given["self"] is of
            and given["keepdim"]
            and [layout.dimensions[dim] for dim in given["dim"]] == [self.pairs.of_experts]
        )

    def _joint(self, number: Number, parts: list[Background | None]) -> Background | None:
        """`number` where all of `parts` have their own: where no expert of any of them is."""
        ids = {one.ids for one in parts if one is not None and one.ids is not None}
        return Background(number, *ids) if len(ids) <= 1 else None


def _stretched(dimension: Any, size: Any) -> Any:
    return dimension if size_expression(size) == size_of(dimension) else features(size)


def _before_views(node: Node, front: int) -> Node:
    """Return the integers that `node` casts, views, or of which it takes a part behind the first `front` dimensions."""

    def is_shown(step: Node) -> bool:
        source = step.all_input_nodes[0] if step.all_input_nodes else step
        value = fake_value(source)
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
            return False
        before, after = ([*map(size_expression, fake_value(node).shape)] for node in (source, step))
        if before[:front] != after[:front]:
            return False
        if has_trait(step, Trait.RESHAPE):
            return [size for size in before if size != 1] == [size for size in after if size != 1]
        is_part = base_operation(step) in ("select", "slice")
        is_part = is_part and (before == after or all_arguments(step).get("dim", 0) % value.dim() == front)
        return is_part or has_trait(step, Trait.CAST, Trait.COPY)

    return origin(node, passes=is_shown)


def _constant(node: Node) -> Number | None:
    """The number that `node` has everywhere; None where that is not plain."""
    if node.op == "get_attr":
        value = constant_of(node)
        with unset_fake_temporarily():
            is_number = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.numel() == 1
            return value.item() if is_number else None
    number = fill_number(node)
    return None if number is None else _cast(number, node)


def _cast(number: Number, node: Node) -> Number:
    """`number` in the type of `node`."""
    with unset_fake_temporarily():  # the compiler runs in fake mode
        return torch.tensor(number).to(fake_value(node).dtype).item()


def _computed(node: Node, numbers: dict[Node, Number]) -> Number | None:
    """What the operation of `node` gives for constants; None where that is more than a number."""

    def constant(used: Node) -> torch.Tensor:
        return torch.full((1,) if fake_value(used).dim() else (), numbers[used], dtype=fake_value(used).dtype)

    if not all(isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes):
        return None
    with unset_fake_temporarily():
        args, kwargs = map_nodes((node.args, node.kwargs), constant)
        kwargs = {name: value for name, value in kwargs.items() if name not in _ABOUT_MEMORY}
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # whatever an operator says to numbers that do not fit it
            return None
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.dtype != fake_value(node).dtype:
            return None
        return result.item()
