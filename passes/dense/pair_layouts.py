"""Positions of experts and tokens in the dimensions of values that dense experts compute.

Every expert computes every position, which is a token or a capacity slot, so values are [experts, positions, features],
with dimensions in any order or missing. A pair is one expert and one of its positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from moepass.passes.graph.input_sizes import size_expression, size_expressions
from moepass.passes.graph.nodes import fake_value, nodes_in, tensor_inputs
from moepass.passes.ops.arguments import all_arguments, dims_along, is_arange, named_arguments, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import first_inputs
from moepass.passes.rows.row_layout import Dimension, Layout, Part, features, is_features, reshaped, size_of


@dataclasses.dataclass(frozen=True)
class Pairs:
    """All pairs of `experts` and `positions`."""

    experts: int
    positions: sympy.Expr

    @property
    def _name(self) -> str:
        # Equal to the name that `row_layout.py` gives to this split of the pairs.
        return f"{self.experts} x {self.positions}"

    @property
    def total(self) -> sympy.Expr:
        return sympy.expand(self.experts * self.positions)

    @property
    def of_experts(self) -> Dimension:
        return (Part(sympy.Integer(self.experts), ((self._name, 0),)),)

    @property
    def of_positions(self) -> Dimension:
        return (Part(self.positions, ((self._name, 1),)),)

    @property
    def of_pairs(self) -> Dimension:
        """The dimension of all pairs, sorted by expert."""
        return (Part(self.total, ()),)

    def has_experts(self, layout: Layout) -> bool:
        return any(share in ((), ((self._name, 0),)) for share in layout.shares)

    def has_positions(self, layout: Layout) -> bool:
        return any(share == () or share[0] == (self._name, 1) for share in layout.shares)

    def has_pairs(self, layout: Layout) -> bool:
        return self.has_experts(layout) and self.has_positions(layout)

    def are_complete(self, layout: Layout) -> bool:
        """Return whether the layout has all experts or none, and all positions or none, in any dimensions."""
        if layout.shares == ((),):
            return True
        positions = tuple(factor for factor in layout.factors if factor.share and factor.share[0] == (self._name, 1))
        experts = tuple(factor for factor in layout.factors if factor.is_rows and factor not in positions)
        has_all = not positions or size_of(positions) == self.positions
        return has_all and experts in ((), self.of_experts)


def feature_dims(layout: Layout) -> list[int]:
    """Return the dimensions that one pair has: all except those with only experts or positions."""
    dimensions = enumerate(layout.dimensions)
    return [dim for dim, each in dimensions if not each or not all(factor.is_rows for factor in each)]


def operand_layouts(node: Node, layout: Layout, pairs: Pairs) -> dict[Node, Layout] | None:
    """Return the operands' layouts if the result of `node` has `layout`; None if it may mix pairs, or is unknown."""
    if has_trait(node, Trait.ITEM):
        return _item_operand(node, layout)
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return None
    if has_trait(node, Trait.ELEMENTWISE):
        return {used: broadcast_operand(layout, fake_value(used).shape) for used in tensor_inputs(node)}
    if has_trait(node, Trait.JOIN):
        return _join_operands(node, layout)
    for source in tensor_inputs(node)[:1]:
        operand = _first_operand(node, layout, fake_value(source).shape, pairs)
        return None if operand is None else {source: operand}
    return None


def _first_operand(node: Node, layout: Layout, shape: Sequence[Any], pairs: Pairs) -> Layout | None:
    if has_trait(node, Trait.RESHAPE):
        return reshaped(layout, shape)
    if has_trait(node, Trait.PERMUTE):
        order = permutation(node)
        return Layout(tuple(layout.dimensions[order.index(dim)] for dim in range(len(order))))
    if has_trait(node, Trait.EXPAND):
        return broadcast_operand(layout, shape)
    if has_trait(node, Trait.REPEAT):
        return _repeat_operand(node, layout, shape, pairs)
    return _operand_along(node, layout, shape) if has_trait(node, Trait.ALONG) else None


def _item_operand(node: Node, layout: Layout) -> dict[Node, Layout] | None:
    """Return the layout of the operand of a split or norm whose result `node` is."""
    operation = node.args[0]
    assert isinstance(operation, Node)
    dimensions = list(layout.dimensions)
    if has_trait(operation, Trait.SPLIT):
        shape = fake_value(operation.all_input_nodes[0]).shape
        dim = all_arguments(operation)["dim"] % len(shape)
        if base_operation(operation) == "unbind":
            dimensions.insert(dim, ())
        elif not is_features(dimensions[dim]):
            return None
        dimensions[dim] = features(shape[dim])
    elif has_trait(operation, Trait.NORM) and node.args[1] == 0:
        count = len(named_arguments(operation)["normalized_shape"])
        if not all(map(is_features, dimensions[-count:])):
            return None
    else:
        return None
    return {operation.all_input_nodes[0]: Layout(tuple(dimensions))}


def broadcast_operand(layout: Layout, shape: Sequence[Any]) -> Layout:
    """Return the layout of an operand with `shape` that is broadcast to `layout`."""
    dimensions = layout.dimensions[len(layout.dimensions) - len(shape) :]
    return Layout(
        tuple(
            dimension if size_expression(size) == size_of(dimension) else features(size)
            for dimension, size in zip(dimensions, shape, strict=True)
        )
    )


def _repeat_operand(node: Node, layout: Layout, shape: Sequence[Any], pairs: Pairs) -> Layout | None:
    """Return the layout of the operand of `repeat`, which may repeat all positions once for every expert."""
    repeats = all_arguments(node)["repeats"]
    new = len(repeats) - len(shape)
    dimensions: list[Dimension] = []
    for dim, (times, dimension) in enumerate(zip(repeats, layout.dimensions, strict=True)):
        size = size_expression(shape[dim - new]) if dim >= new else sympy.Integer(1)
        if times == 1 or size == 1:
            operand_dimension = dimension if times == 1 else features(size)
        elif is_features(dimension):
            operand_dimension = features(size)
        elif dimension == pairs.of_pairs and times == pairs.experts and size == pairs.positions:
            operand_dimension = pairs.of_positions
        else:
            return None
        if dim >= new:
            dimensions.append(operand_dimension)
    return Layout(tuple(dimensions))


def _operand_along(node: Node, layout: Layout, shape: Sequence[Any]) -> Layout | None:
    base, arguments, dims = base_operation(node), all_arguments(node), dims_along(node, len(shape))
    if dims is None:
        return None
    dimensions = list(layout.dimensions)
    if base == "select" or (has_trait(node, Trait.REDUCE) and not arguments.get("keepdim", False)):
        for dim in sorted(dims):
            dimensions.insert(dim, ())
    for dim in dims:
        if is_features(dimensions[dim]):
            dimensions[dim] = features(shape[dim])
        elif base != "slice" or arguments["step"] != 1 or size_of(dimensions[dim]) != size_expression(shape[dim]):
            return None
    return Layout(tuple(dimensions))


def _join_operands(node: Node, layout: Layout) -> dict[Node, Layout] | None:
    arguments = all_arguments(node)
    dim = arguments["dim"] % len(layout.dimensions)
    if not is_features(layout.dimensions[dim]):
        return None
    layouts: dict[Node, Layout] = {}
    for used in nodes_in(arguments["tensors"]):
        joined = [] if base_operation(node) == "stack" else [features(fake_value(used).shape[dim])]
        layouts[used] = Layout((*layout.dimensions[:dim], *joined, *layout.dimensions[dim + 1 :]))
    return layouts


def is_broadcast_arange(node: Any) -> bool:
    """Return whether `node` is 0, 1, 2, .. along one dimension, and has size 1 in all others."""
    if not isinstance(node, Node):
        return False
    *steps, source = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY, Trait.CAST))
    if not is_arange(source) or any(fake_value(step).dtype not in (torch.int32, torch.int64) for step in steps):
        return False
    return len([size for size in size_expressions(fake_value(node).shape) if size != 1]) == 1
