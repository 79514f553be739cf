"""Sums over experts of the results of dense experts."""

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

# Limit for the operations from the experts to the sum.
_MOST_NODES = 200


@dataclasses.dataclass(frozen=True)
class SumOverExperts:
    """A sum `node` of `value` over experts, with `weights` or the weights of a summed `gemm` as factors."""

    node: Node
    pairs: Pairs
    value: Node
    layout: Layout
    result_layout: Layout
    weights: Node | None = None
    weights_layout: Layout | None = None
    gemm: DenseGemm | None = None


class PairFlow(RowRules):
    """Layouts of experts and positions after a GEMM; other operands may have a value for each of them."""

    def __init__(self, start: Node, layout: Layout) -> None:
        super().__init__((), {})
        self._layouts[start] = layout

    def layout(self, node: Node) -> Layout | None:
        layout = self._layouts.get(node)
        return layout if isinstance(layout, Layout) else None

    def follow(self, node: Node) -> bool:
        """Record the layout of the result; return False if experts and positions cannot be followed."""
        if node.op != "call_function" or mutates(node) or draws_random_numbers(node):
            return False
        try:
            layouts = self.with_rows(node)
        except NotThisForm:
            return False
        self._layouts[node] = layouts
        return any(layout is not None and layout.has_rows for layout in several(layouts))

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """Accept a constant with different values for experts or positions."""


def sums_over_experts(graph: Graph) -> Iterator[SumOverExperts]:
    """Yield every sum over the results of dense experts, in graph order for each GEMM."""
    for node in list(graph.nodes):
        gemm = dense_gemm(node)
        if gemm is None or gemm.kind == "summed" or gemm.experts == 1 or gemm.positions == 1:
            continue
        pairs = Pairs(gemm.experts, gemm.positions)
        yield from _sums_after(node, gemm.result_layout(pairs), pairs)


def _sums_after(start: Node, layout: Layout, pairs: Pairs) -> Iterator[SumOverExperts]:
    flow = PairFlow(start, layout)
    pending, seen = [start], {start}
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop(0)
        for user in _in_order(node.users):
            if user in seen:
                continue
            expert_sum = _sum_of(user, node, flow.layout(node), pairs)
            if expert_sum is not None:
                seen.add(user)
                yield expert_sum
            elif dense_gemm(user) is None and flow.follow(user):
                seen.add(user)
                pending.append(user)


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes)


def _sum_of(node: Node, value: Node, layout: Layout | None, pairs: Pairs) -> SumOverExperts | None:
    if layout is None or not pairs.has_pairs(layout) or not pairs.are_complete(layout):
        return None
    if is_call(node, aten.sum.dim_IntList):
        arguments = all_arguments(node)
        dims = [dim % len(layout.dimensions) for dim in arguments["dim"] or ()]
        if [layout.dimensions[dim] for dim in dims] != [pairs.of_experts]:
            return None
        if arguments["dtype"] not in (None, fake_value(value).dtype):
            return None
        dimensions: list[Any] = list(layout.dimensions)
        dimensions[dims[0] : dims[0] + 1] = [()] * bool(arguments["keepdim"])
        return SumOverExperts(node, pairs, value, layout, Layout(tuple(dimensions)))
    gemm = dense_gemm(node)
    if gemm is not None:
        is_summed = gemm.kind == "summed" and gemm.rows is value and gemm.rows_layout(pairs) == layout
        if not is_summed or gemm.added is not None:
            return None
        return SumOverExperts(node, pairs, value, layout, gemm.result_layout(pairs), gemm=gemm)
    if is_call(node, aten.bmm.default):
        return _weighted(node, value, layout, pairs)
    return None


def _weighted(node: Node, value: Node, layout: Layout, pairs: Pairs) -> SumOverExperts | None:
    """Return a product of each position's weights [1, experts] and results [experts, features], or None."""
    left, right = node.args
    batch, rows, columns = layout.dimensions
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    if value is right and value is not left and rows == pairs.of_experts:
        weights, weights_layout = left, Layout((batch, (), rows))
        result = Layout((batch, (), columns))
    elif value is left and value is not right and columns == pairs.of_experts:
        weights, weights_layout = right, Layout((batch, columns, ()))
        result = Layout((batch, rows, ()))
    else:
        return None
    is_vector = fake_value(weights).shape[1 if weights is left else 2] == 1
    return SumOverExperts(node, pairs, value, layout, result, weights, weights_layout) if is_vector else None
