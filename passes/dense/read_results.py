"""What reads the results of dense experts: where they are added up over experts, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs
from moepass.passes.graph.nodes import fake_value, is_call, several
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.traits import draws_random_numbers, mutates
from moepass.passes.rows.row_layout import Layout
from moepass.passes.rows.row_rules import RowRules

aten = torch.ops.aten

# Of what experts compute, and of what is computed of it before it is added up.
_MOST_NODES = 200


@dataclasses.dataclass(frozen=True)
class SumOverExperts:
    """`node` adds up `value`, in which experts and places lie as in `layout`, over experts, along dimension `dim`.

    It may weigh it by `weights`, with as many dimensions as `of_weights` says, or multiply it by those of `gemm`.
    """

    node: Node
    pairs: Pairs
    value: Node
    layout: Layout
    result: Layout
    weights: Node | None = None
    of_weights: Layout | None = None
    gemm: DenseGemm | None = None


class Forward(RowRules):
    """Follows experts and places from what a GEMM gives. What else there is may have something for each of them."""

    def __init__(self, start: Node, layout: Layout) -> None:
        super().__init__((), {})
        self._layouts[start] = layout

    def layout(self, node: Node) -> Layout | None:
        found = self._layouts.get(node)
        return found if isinstance(found, Layout) else None

    def follow(self, node: Node) -> bool:
        """Learn of a node; False where experts and places cannot be followed through it."""
        if node.op != "call_function" or mutates(node) or draws_random_numbers(node):
            return False
        try:
            found = self.with_rows(node)
        except NotThisForm:
            return False
        self._layouts[node] = found
        return any(one is not None and one.has_rows for one in several(found))

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """It may be another one for each expert, or place."""


def sums_over_experts(graph: Graph) -> Iterator[SumOverExperts]:
    """Every place of `graph` where the results of dense experts are added up, in host order."""
    for node in list(graph.nodes):
        gemm = dense_gemm(node)
        if gemm is None or gemm.kind == "summed" or gemm.experts == 1 or gemm.places == 1:
            continue
        pairs = Pairs(gemm.experts, gemm.places)
        yield from _sums_behind(node, gemm.result(pairs), pairs)


def _sums_behind(start: Node, layout: Layout, pairs: Pairs) -> Iterator[SumOverExperts]:
    rules = Forward(start, layout)
    pending, seen = [start], {start}
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop(0)
        for user in _in_order(node.users):
            if user in seen:
                continue
            found = _sum_of(user, node, rules.layout(node), pairs)
            if found is not None:
                seen.add(user)
                yield found
            elif dense_gemm(user) is None and rules.follow(user):
                seen.add(user)
                pending.append(user)


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes)


def _sum_of(node: Node, value: Node, layout: Layout | None, pairs: Pairs) -> SumOverExperts | None:
    if layout is None or not pairs.has_pairs(layout) or not pairs.are_known(layout):
        return None
    if is_call(node, aten.sum.dim_IntList):
        given = all_arguments(node)
        dims = [dim % len(layout.dimensions) for dim in given["dim"] or ()]
        if [layout.dimensions[dim] for dim in dims] != [pairs.of_experts]:
            return None
        if given["dtype"] not in (None, fake_value(value).dtype):
            return None
        dimensions: list[Any] = list(layout.dimensions)
        dimensions[dims[0] : dims[0] + 1] = [()] * bool(given["keepdim"])
        return SumOverExperts(node, pairs, value, layout, Layout(tuple(dimensions)))
    gemm = dense_gemm(node)
    if gemm is not None:
        is_summed = gemm.kind == "summed" and gemm.rows is value and gemm.of_rows(pairs) == layout
        if not is_summed or gemm.added is not None:
            return None
        return SumOverExperts(node, pairs, value, layout, gemm.result(pairs), gemm=gemm)
    if is_call(node, aten.bmm.default):
        return _weighed(node, value, layout, pairs)
    return None


def _weighed(node: Node, value: Node, layout: Layout, pairs: Pairs) -> SumOverExperts | None:
    """A product of each token's weights [1, experts] and its results [experts, features]."""
    left, right = node.args
    batch, rows, columns = layout.dimensions
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    if value is right and value is not left and rows == pairs.of_experts:
        weights, of_weights = left, Layout((batch, (), rows))
        result = Layout((batch, (), columns))
    elif value is left and value is not right and columns == pairs.of_experts:
        weights, of_weights = right, Layout((batch, columns, ()))
        result = Layout((batch, rows, ()))
    else:
        return None
    is_one = fake_value(weights).shape[1 if weights is left else 2] == 1
    return SumOverExperts(node, pairs, value, layout, result, weights, of_weights) if is_one else None
