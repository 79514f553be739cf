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

from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, nodes_in
from moepass.passes.ops.arguments import all_arguments, is_arange, named_arguments, permutation
from moepass.passes.ops.traits import Trait, base_operation, has_trait
from moepass.passes.ops.walk import first_inputs
from moepass.passes.rows.row_layout import Dimension, Layout, Part, features, reshaped, size_of


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
        shares = [share for share in layout.shares if share]
        position_shares = [share for share in shares if share[0] == (self._name, 1)]
        total = sympy.expand(sympy.Mul(*(each.size for each in pair_factors(layout) if each.share in position_shares)))
        expert_shares = [share for share in shares if share not in position_shares]
        has_all = not position_shares or total == self.positions
        return has_all and expert_shares in ([], [((self._name, 0),)]) and (() not in layout.shares or not shares)


def pair_factors(layout: Layout) -> list[Part]:
    """Return the factors of experts and positions, in the order of dimensions."""
    return [factor for dimension in layout.dimensions for factor in dimension if factor.is_rows]


def is_features(dimension: Dimension) -> bool:
    return not any(factor.is_rows for factor in dimension)


def features_in(dimension: Dimension) -> sympy.Expr:
    return size_of(tuple(factor for factor in dimension if not factor.is_rows))


def feature_dims(layout: Layout) -> list[int]:
    """Return the dimensions that one pair has: all except those with only experts or positions."""
    return [
        dim
        for dim, dimension in enumerate(layout.dimensions)
        if is_features(dimension) or any(not factor.is_rows for factor in dimension)
    ]


def operand_layouts(node: Node, layout: Layout, pairs: Pairs) -> dict[Node, Layout] | None:
    """Return the operands' layouts if the result of `node` has `layout`; None if it may mix pairs, or is unknown."""
    if node.op != "call_function":
        return None
    base = base_operation(node)
    if has_trait(node, Trait.ITEM):
        return _item_operand(node, layout)
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return None
    if has_trait(node, Trait.ELEMENTWISE):
        return {used: broadcast_operand(layout, fake_value(used).shape) for used in _tensors(node)}
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape = getattr(fake_value(source), "shape", ())
    if has_trait(node, Trait.RESHAPE):
        return _only(source, reshaped(layout, shape))
    if has_trait(node, Trait.PERMUTE):
        order = permutation(node)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return {source: Layout(tuple(layout.dimensions[dim] for dim in inverse))}
    if base == "expand":
        return {source: broadcast_operand(layout, shape)}
    if base == "repeat":
        return _only(source, _repeat_operand(node, layout, shape, pairs))
    if has_trait(node, Trait.ALONG):
        return _only(source, _operand_along(node, base, layout, shape))
    if has_trait(node, Trait.JOIN):
        return _join_operands(node, base, layout)
    return None


def _tensors(node: Node) -> list[Node]:
    return [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]


def _only(source: Node, layout: Layout | None) -> dict[Node, Layout] | None:
    return None if layout is None else {source: layout}


def _item_operand(node: Node, layout: Layout) -> dict[Node, Layout] | None:
    operation = node.args[0]
    assert isinstance(operation, Node)
    if not isinstance(operation.target, torch._ops.OpOverload):
        return None
    base = base_operation(operation)
    source = operation.all_input_nodes[0]
    shape = fake_value(source).shape
    if has_trait(operation, Trait.SPLIT):
        arguments = all_arguments(operation)
        dim = arguments["dim"] % len(shape)
        dimensions = list(layout.dimensions)
        if base == "unbind":
            dimensions.insert(dim, features(shape[dim]))
        elif not is_features(dimensions[dim]):
            return None
        else:
            dimensions[dim] = features(shape[dim])
        return {source: Layout(tuple(dimensions))}
    if has_trait(operation, Trait.NORM) and node.args[1] == 0:
        arguments = named_arguments(operation)
        count = len(arguments["normalized_shape"])
        if not all(map(is_features, layout.dimensions[-count:])):
            return None
        return {source: layout}
    return None


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


def _operand_along(node: Node, base: str, layout: Layout, shape: Sequence[Any]) -> Layout | None:
    values = all_arguments(node)
    name = next((key for key in ("dim", "dims") if key in values), None)
    if name is None or values[name] is None or values[name] == []:
        return None
    dims = [dim % len(shape) for dim in (values[name] if isinstance(values[name], (list, tuple)) else [values[name]])]
    dimensions = list(layout.dimensions)
    if base == "select" or (has_trait(node, Trait.REDUCE) and not values.get("keepdim", False)):
        for dim in sorted(dims):
            dimensions.insert(dim, features(shape[dim]))
    else:
        for dim in dims:
            if not is_features(dimensions[dim]):
                is_full = base == "slice" and size_of(dimensions[dim]) == size_expression(shape[dim])
                if not is_full or values.get("step", 1) != 1:
                    return None
            else:
                dimensions[dim] = features(shape[dim])
    return Layout(tuple(dimensions))


def _join_operands(node: Node, base: str, layout: Layout) -> dict[Node, Layout] | None:
    arguments = all_arguments(node)
    dim = arguments["dim"] % len(layout.dimensions)
    if not is_features(layout.dimensions[dim]):
        return None
    layouts: dict[Node, Layout] = {}
    for used in nodes_in(arguments["tensors"]):
        dimensions = list(layout.dimensions)
        if base == "stack":
            del dimensions[dim]
        else:
            dimensions[dim] = features(fake_value(used).shape[dim])
        if layouts.setdefault(used, Layout(tuple(dimensions))).dimensions != tuple(dimensions):
            return None
    return layouts


def is_broadcast_arange(node: Any) -> bool:
    """Return whether `node` is 0, 1, 2, .. along one dimension, and has size 1 in all others."""
    if not isinstance(node, Node):
        return False
    *steps, source = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY, Trait.CAST))
    return is_arange(source) and all(fake_value(step).dtype in (torch.int32, torch.int64) for step in steps)
