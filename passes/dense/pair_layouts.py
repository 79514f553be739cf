"""Where experts and their places lie in the dimensions of what dense experts compute, followed back to operands.

Every expert computes every place, a token or a slot, so values are [experts, places, features], in any order of these,
or without some of them. A pair is one expert and one place of it.
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
    """The pairs of `experts` and `places`."""

    experts: int
    places: sympy.Expr

    @property
    def _name(self) -> str:
        # That which `row_layout.py` gives these when it takes all pairs apart.
        return f"{self.experts} x {self.places}"

    @property
    def total(self) -> sympy.Expr:
        return sympy.expand(self.experts * self.places)

    @property
    def of_experts(self) -> Dimension:
        return (Part(sympy.Integer(self.experts), ((self._name, 0),)),)

    @property
    def of_places(self) -> Dimension:
        return (Part(self.places, ((self._name, 1),)),)

    @property
    def of_all(self) -> Dimension:
        """One dimension with the places of every expert, one expert after the other."""
        return (Part(self.total, ()),)

    def has_experts(self, layout: Layout) -> bool:
        return any(share in ((), ((self._name, 0),)) for share in layout.shares)

    def has_places(self, layout: Layout) -> bool:
        return any(share == () or share[0] == (self._name, 1) for share in layout.shares)

    def has_pairs(self, layout: Layout) -> bool:
        return self.has_experts(layout) and self.has_places(layout)

    def are_known(self, layout: Layout) -> bool:
        """True where experts and places lie in it each as a whole, or all places of all experts."""
        shares = [share for share in layout.shares if share]
        own = [share for share in shares if share[0] == (self._name, 1)]
        total = sympy.expand(sympy.Mul(*(part.size for part in parts_of(layout) if part.share in own)))
        others = [share for share in shares if share not in own]
        is_whole = not own or total == self.places
        return is_whole and others in ([], [((self._name, 0),)]) and (() not in layout.shares or not shares)


def parts_of(layout: Layout) -> list[Part]:
    """Of experts and places, in the order of dimensions."""
    return [part for dimension in layout.dimensions for part in dimension if part.is_rows]


def is_plain(dimension: Dimension) -> bool:
    """True for features alone."""
    return not any(part.is_rows for part in dimension)


def features_in(dimension: Dimension) -> sympy.Expr:
    return size_of(tuple(part for part in dimension if not part.is_rows))


def kept(layout: Layout) -> list[int]:
    """The dimensions that are there for one pair: all but those of experts and places alone."""
    return [
        dim
        for dim, dimension in enumerate(layout.dimensions)
        if is_plain(dimension) or any(not part.is_rows for part in dimension)
    ]


def sources(node: Node, layout: Layout, pairs: Pairs) -> dict[Node, Layout] | None:
    """Where experts and places lie in the operands of `node`, whose result has `layout`.

    None where it is no operation that treats every pair alone, or where they cannot be followed.
    """
    if node.op != "call_function":
        return None
    base = base_operation(node)
    if has_trait(node, Trait.ITEM):
        return _sources_of_item(node, layout)
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(fake_value(node), torch.Tensor):
        return None
    if has_trait(node, Trait.ELEMENTWISE):
        return {used: broadcast_back(layout, fake_value(used).shape) for used in _tensors(node)}
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape = getattr(fake_value(source), "shape", ())
    if has_trait(node, Trait.RESHAPE):
        return _only(source, reshaped(layout, shape))
    if has_trait(node, Trait.PERMUTE):
        order = permutation(node)
        back = sorted(range(len(order)), key=order.__getitem__)
        return {source: Layout(tuple(layout.dimensions[place] for place in back))}
    if base == "expand":
        return {source: broadcast_back(layout, shape)}
    if base == "repeat":
        return _only(source, _before_repeat(node, layout, shape, pairs))
    if has_trait(node, Trait.ALONG):
        return _only(source, _along_back(node, base, layout, shape))
    if has_trait(node, Trait.JOIN):
        return _joined_back(node, base, layout)
    return None


def _tensors(node: Node) -> list[Node]:
    return [used for used in node.all_input_nodes if isinstance(fake_value(used), torch.Tensor)]


def _only(source: Node, layout: Layout | None) -> dict[Node, Layout] | None:
    return None if layout is None else {source: layout}


def _sources_of_item(node: Node, layout: Layout) -> dict[Node, Layout] | None:
    cut = node.args[0]
    assert isinstance(cut, Node)
    if not isinstance(cut.target, torch._ops.OpOverload):
        return None
    base = base_operation(cut)
    source = cut.all_input_nodes[0]
    shape = fake_value(source).shape
    if has_trait(cut, Trait.SPLIT):
        given = all_arguments(cut)
        dim = given["dim"] % len(shape)
        dimensions = list(layout.dimensions)
        if base == "unbind":
            dimensions.insert(dim, features(shape[dim]))
        elif not is_plain(dimensions[dim]):
            return None
        else:
            dimensions[dim] = features(shape[dim])
        return {source: Layout(tuple(dimensions))}
    if has_trait(cut, Trait.NORM) and node.args[1] == 0:
        given = named_arguments(cut)
        count = len(given["normalized_shape"])
        if not all(map(is_plain, layout.dimensions[-count:])):
            return None
        return {source: layout}
    return None


def broadcast_back(layout: Layout, shape: Sequence[Any]) -> Layout:
    """Of an operand with that `shape`, which is stretched to what has `layout`."""
    dimensions = layout.dimensions[len(layout.dimensions) - len(shape) :]
    return Layout(
        tuple(
            dimension if size_expression(size) == size_of(dimension) else features(size)
            for dimension, size in zip(dimensions, shape, strict=True)
        )
    )


def _before_repeat(node: Node, layout: Layout, shape: Sequence[Any], pairs: Pairs) -> Layout | None:
    """Of what is repeated as a whole, once for every expert."""
    repeats = all_arguments(node)["repeats"]
    new = len(repeats) - len(shape)
    dimensions: list[Dimension] = []
    for place, (times, dimension) in enumerate(zip(repeats, layout.dimensions, strict=True)):
        size = size_expression(shape[place - new]) if place >= new else sympy.Integer(1)
        if times == 1 or size == 1:
            found = dimension if times == 1 else features(size)
        elif is_plain(dimension):
            found = features(size)
        elif dimension == pairs.of_all and times == pairs.experts and size == pairs.places:
            found = pairs.of_places
        else:
            return None
        if place >= new:
            dimensions.append(found)
    return Layout(tuple(dimensions))


def _along_back(node: Node, base: str, layout: Layout, shape: Sequence[Any]) -> Layout | None:
    given = all_arguments(node)
    name = next((one for one in ("dim", "dims") if one in given), None)
    if name is None or given[name] is None or given[name] == []:
        return None
    dims = [dim % len(shape) for dim in (given[name] if isinstance(given[name], (list, tuple)) else [given[name]])]
    dimensions = list(layout.dimensions)
    if base == "select" or (has_trait(node, Trait.REDUCE) and not given.get("keepdim", False)):
        for dim in sorted(dims):
            dimensions.insert(dim, features(shape[dim]))
    else:
        for dim in dims:
            if not is_plain(dimensions[dim]):
                is_whole = base == "slice" and size_of(dimensions[dim]) == size_expression(shape[dim])
                if not is_whole or given.get("step", 1) != 1:
                    return None
            else:
                dimensions[dim] = features(shape[dim])
    return Layout(tuple(dimensions))


def _joined_back(node: Node, base: str, layout: Layout) -> dict[Node, Layout] | None:
    given = all_arguments(node)
    dim = given["dim"] % len(layout.dimensions)
    if not is_plain(layout.dimensions[dim]):
        return None
    found: dict[Node, Layout] = {}
    for used in nodes_in(given["tensors"]):
        dimensions = list(layout.dimensions)
        if base == "stack":
            del dimensions[dim]
        else:
            dimensions[dim] = features(fake_value(used).shape[dim])
        if found.setdefault(used, Layout(tuple(dimensions))).dimensions != tuple(dimensions):
            return None
    return found


def is_broadcast_arange(node: Any) -> bool:
    """Return whether `node` is 0, 1, 2, .. along one dimension, and has size 1 in all others."""
    if not isinstance(node, Node):
        return False
    *steps, source = first_inputs(node, lambda step: has_trait(step, Trait.RESHAPE, Trait.COPY, Trait.CAST))
    return is_arange(source) and all(fake_value(step).dtype in (torch.int32, torch.int64) for step in steps)
