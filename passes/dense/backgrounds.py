"""Backgrounds: the constant values of pairs of token and expert that a router did not choose.

A router's weights [tokens, experts] are zero, or another constant, except for the k experts of each token:

    zeros.scatter(1, ids, weights)                      and with -inf, before a softmax or a sigmoid
    (one_hot(ids) * weights.unsqueeze(-1)).sum(1)       and as a product of both
    scores * mask, scores.masked_fill(~mask, 0)         with masks of these forms

The constant is followed through later operations: an operation on constants is computed, and 0 times anything is 0, as
is the product of rows of zeros with a matrix. This ignores that 0 · inf is NaN, so that a value that is not finite
affects only pairs that were chosen.
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

_MEMORY_OPTIONS = ("device", "pin_memory", "memory_format", "non_blocking")
_MOVES = (Trait.RESHAPE, Trait.PERMUTE, Trait.EXPAND, Trait.REPEAT, Trait.SLICE, Trait.COPY)


@dataclasses.dataclass(frozen=True)
class Background:
    """The `number` of all pairs, except those with the experts `ids` [positions, k], or [positions], if these exist."""

    number: Number
    ids: Node | None = None

    @property
    def is_zero(self) -> bool:
        return self.number == 0


class Backgrounds:
    """The backgrounds of values of `pairs`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._cache: dict[tuple[Node, Layout], Background | None] = {}

    def of(self, node: Node, layout: Layout) -> Background | None:
        """Return the background of `node`, which has `layout`, or None."""
        key = (node, layout)
        if key not in self._cache:
            self._cache[key] = None  # ends recursions
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
        if base == "eq" and (compared := self._compared(node, layout)) is not None:
            return compared
        gemm = dense_gemm(node)
        if gemm is not None and gemm.kind != "summed" and gemm.result_layout(self.pairs) == layout:
            return self._gemm(gemm.rows, gemm.rows_layout(self.pairs), gemm.added, layout)
        if base in ("bmm", "mm"):
            return self._matrix_product(node, layout)
        if has_trait(node, Trait.SOFTMAX):
            return self._softmax(node, layout)
        layouts = operand_layouts(node, layout, self.pairs)
        if layouts is None:
            return None
        operands = {used: self.of(used, operand_layout) for used, operand_layout in layouts.items()}
        if has_trait(node, *_MOVES) or (base == "getitem" and has_trait(node.args[0], Trait.SPLIT)):
            return next(iter(operands.values()))
        if has_trait(node, Trait.JOIN):
            return self._joined(list(operands.values()))
        if has_trait(node, Trait.REDUCE):
            return self._reduced(base, next(iter(operands.values())))
        return self._elementwise(node, base, operands, layout) if has_trait(node, Trait.ELEMENTWISE) else None

    def _scattered(self, node: Node, layout: Layout) -> Background | None:
        """Return the background of a scatter to the experts of each position, into a constant."""
        arguments = all_arguments(node)
        if arguments.get("reduce") is not None:
            return None
        source, index = self.of(arguments["self"], layout), arguments["index"]
        *front, last = layout.dimensions
        is_along_experts = arguments["dim"] % len(layout.dimensions) == len(front) and last == self.pairs.of_experts
        sizes = [size_expression(size) for size in fake_value(index).shape[:-1]]
        # With fewer ids than positions, the last positions would have no expert.
        if source is None or not is_along_experts or sizes != [size_of(dimension) for dimension in front]:
            return None
        ids = self._ids(index, [*front, ()])
        return None if ids is None or source.ids not in (None, ids) else Background(source.number, ids)

    def _compared(self, node: Node, layout: Layout) -> Background | None:
        """Return the background of `ids.unsqueeze(-1) == arange(experts)`."""
        arguments = all_arguments(node)
        layouts = operand_layouts(node, layout, self.pairs) or {}
        for ids_view, numbers in ((arguments["self"], arguments["other"]), (arguments["other"], arguments["self"])):
            if not isinstance(ids_view, Node) or not is_broadcast_arange(numbers):
                continue
            if [each for each in layouts[numbers].dimensions if not is_features(each)] != [self.pairs.of_experts]:
                continue
            ids = self._ids(ids_view, [each for each in layouts[ids_view].dimensions if each])
            if ids is not None:
                return Background(False, ids)
        return None

    def _ids(self, node: Node, dimensions: list[Any]) -> Node | None:
        """Return a router's distinct ids [positions, k] from which `node` is taken; positions lead its `dimensions`."""
        leading = [each for each in dimensions if not is_features(each)]
        front, layout = len(leading), Layout(tuple(leading))
        has_only_positions = self.pairs.has_positions(layout) and not self.pairs.has_experts(layout)
        if not has_only_positions or not self.pairs.are_complete(layout) or dimensions[:front] != leading:
            return None
        ids = _ids_source(node, front)
        sizes = [size_expression(size) for size in fake_value(ids).shape[:front]]
        has_all = fake_value(ids).dim() in (front, front + 1) and sizes == [size_of(each) for each in leading]
        return ids if has_all and self._are_chosen(ids, front) else None

    def _are_chosen(self, ids: Node, dim: int) -> bool:
        """Return whether `ids` are the indices of a top-k or argmax over all experts, along `dim` or without it."""
        chosen = ids.args[0] if is_call(ids, operator.getitem) and ids.args[1] == 1 else ids
        if not isinstance(chosen, Node) or chosen.op != "call_function":
            return False
        arguments = all_arguments(chosen)
        scores = arguments.get("self")
        if not isinstance(scores, Node) or arguments.get("dim") is None:
            return False
        value = fake_value(scores)
        is_over_experts = (
            arguments["dim"] % value.dim() == dim == value.dim() - 1 and value.shape[dim] == self.pairs.experts
        )
        is_top = is_call(chosen, aten.topk.default) and isinstance(arguments["k"], int)
        return bool(is_over_experts and (is_top or is_call(chosen, aten.argmax.default, aten.max.dim)))

    def _gemm(self, rows: Node, layout: Layout, added: Any, result: Layout) -> Background | None:
        background = self.of(rows, layout)
        if background is None or not background.is_zero:
            return None
        if added is None:
            return Background(0, background.ids)
        # The added operand must have a zero background, too.
        value = fake_value(added)
        dimensions = result.dimensions[len(result.dimensions) - value.dim() :]
        addend = self.of(added, Layout(tuple(_narrowed(*pair) for pair in zip(dimensions, value.shape, strict=True))))
        return None if addend is None or not addend.is_zero else self._combined(0, [background, addend])

    def _matrix_product(self, node: Node, layout: Layout) -> Background | None:
        """Return the zero background of a product that does not sum over experts, if a factor has one."""
        arguments = all_arguments(node)
        left, right = arguments["self"], arguments["mat2"]
        batch = len(layout.dimensions) - 2
        *front, rows, columns = layout.dimensions
        summed = features(fake_value(left).shape[-1])
        left_layout, right_layout = Layout((*front, rows, summed)), Layout((*front, summed, columns))
        assert batch in (0, 1)
        for factor, factor_layout in ((left, left_layout), (right, right_layout)):
            if self.pairs.has_experts(factor_layout):
                background = self.of(factor, factor_layout)
                if background is not None and background.is_zero:
                    return Background(0, background.ids)
        return None

    def _softmax(self, node: Node, layout: Layout) -> Background | None:
        """Return the zero background of a softmax over experts with background -inf."""
        arguments = all_arguments(node)
        dim = arguments["dim"] % len(layout.dimensions)
        if layout.dimensions[dim] != self.pairs.of_experts:
            return None
        background = self.of(arguments["self"], layout)
        is_masked = background is not None and background.ids is not None and background.number == -math.inf
        return Background(0, background.ids) if is_masked and background is not None else None

    def _joined(self, operands: list[Background | None]) -> Background | None:
        first = operands[0]
        if first is None or any(each is None or each.number != first.number for each in operands):
            return None
        return self._combined(first.number, operands)

    def _reduced(self, base: str, background: Background | None) -> Background | None:
        if background is None:
            return None
        is_same = base in ("amax", "amin", "any", "all") or (background.is_zero and base in ("sum", "mean", "prod"))
        return background if is_same else None

    def _elementwise(
        self, node: Node, base: str, operands: dict[Node, Background | None], layout: Layout
    ) -> Background | None:
        arguments = all_arguments(node)
        if has_trait(node, Trait.AND):
            zero = next((each for each in operands.values() if each is not None and each.is_zero), None)
            # A background that is not finite, such as from a norm of zeros, makes every token NaN.
            is_spoiled = any(each is not None and not math.isfinite(each.number) for each in operands.values())
            if zero is not None and not is_spoiled:
                return Background(_cast(0, node), zero.ids)
        if base == "div" and arguments.get("rounding_mode") is None:
            numerator = operands.get(arguments["self"])
            if numerator is not None and numerator.is_zero and operands.get(arguments["other"]) is None:
                return Background(0, numerator.ids)
        if base == "masked_fill" and isinstance(arguments["value"], (bool, int, float)):
            mask = operands[arguments["mask"]]
            if mask is not None and mask.number:
                return Background(_cast(arguments["value"], node), mask.ids)
        if base == "where":
            condition = operands.get(arguments["condition"])
            if condition is not None:
                taken = arguments["self"] if condition.number else arguments["other"]
                branch = operands.get(taken) if isinstance(taken, Node) else Background(taken)
                return None if branch is None else self._combined(_cast(branch.number, node), [condition, branch])
        if base == "sub" and arguments["alpha"] == 1 and isinstance(arguments["other"], Node):
            # The first step of a softmax: the maximum is finite, or makes chosen pairs NaN too.
            masked = operands.get(arguments["self"])
            is_largest = self._is_maximum(arguments["other"], arguments["self"], layout)
            if is_largest and masked is not None and masked.ids is not None and masked.number == -math.inf:
                return masked
        if any(each is None for each in operands.values()):
            return None
        number = _computed(node, {used: each.number for used, each in operands.items() if each is not None})
        return None if number is None else self._combined(number, list(operands.values()))

    def _is_maximum(self, node: Node, of: Node, layout: Layout) -> bool:
        """Return whether `node` is the maximum over all experts in `of`, which has `layout`."""
        if not is_call(node, aten.amax.default) or fake_value(of).dim() != len(layout.dimensions):
            return False
        arguments = all_arguments(node)
        return (
            arguments["self"] is of
            and arguments["keepdim"]
            and [layout.dimensions[dim] for dim in arguments["dim"]] == [self.pairs.of_experts]
        )

    def _combined(self, number: Number, operands: list[Background | None]) -> Background | None:
        """Return the background `number` of pairs that are background in all operands; None for different ids."""
        ids = {each.ids for each in operands if each is not None and each.ids is not None}
        return Background(number, *ids) if len(ids) <= 1 else None


def _narrowed(dimension: Any, size: Any) -> Any:
    return dimension if size_expression(size) == size_of(dimension) else features(size)


def _ids_source(node: Node, front: int) -> Node:
    """Return the integers that `node` casts, views, or slices along the dimension after the first `front`."""

    def keeps_ids(step: Node) -> bool:
        source = step.all_input_nodes[0] if step.all_input_nodes else step
        value = fake_value(source)
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
            return False
        before, after = ([*map(size_expression, fake_value(node).shape)] for node in (source, step))
        if before[:front] != after[:front]:
            return False
        if has_trait(step, Trait.RESHAPE):
            return [size for size in before if size != 1] == [size for size in after if size != 1]
        is_slice = base_operation(step) in ("select", "slice")
        is_slice = is_slice and (before == after or all_arguments(step).get("dim", 0) % value.dim() == front)
        return is_slice or has_trait(step, Trait.CAST, Trait.COPY)

    return origin(node, passes=keeps_ids)


def _constant(node: Node) -> Number | None:
    """Return the number that all elements of `node` are known to equal, or None."""
    if node.op == "get_attr":
        value = constant_of(node)
        with unset_fake_temporarily():
            is_number = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.numel() == 1
            return value.item() if is_number else None
    number = fill_number(node)
    return None if number is None else _cast(number, node)


def _cast(number: Number, node: Node) -> Number:
    with unset_fake_temporarily():  # the compiler runs in fake mode
        return torch.tensor(number).to(fake_value(node).dtype).item()


def _computed(node: Node, numbers: dict[Node, Number]) -> Number | None:
    """Return the result of the operation of `node` on constants; None unless it is one number."""

    def constant(used: Node) -> torch.Tensor:
        return torch.full((1,) if fake_value(used).dim() else (), numbers[used], dtype=fake_value(used).dtype)

    if not all(isinstance(fake_value(used), torch.Tensor) for used in node.all_input_nodes):
        return None
    with unset_fake_temporarily():
        args, kwargs = map_nodes((node.args, node.kwargs), constant)
        kwargs = {name: value for name, value in kwargs.items() if name not in _MEMORY_OPTIONS}
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # operators raise many types for numbers that they reject
            return None
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or result.dtype != fake_value(node).dtype:
            return None
        return result.item()
