"""Sums over experts of the results of dense experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.ops.arguments import all_arguments, matrix_operands
from moepass.passes.ops.traits import draws_random_numbers, mutates
from moepass.passes.ops.walk import walk
from moepass.passes.rows.row_layout import Layout
from moepass.passes.rows.row_rules import RowRules, any_rows

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
    """Layouts of experts and positions after `gemm`; other operands may have a value for each of them."""

    def __init__(self, gemm: DenseGemm) -> None:
        super().__init__()
        self._layouts[gemm.node] = gemm.result_layout

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
        return any_rows(layouts)

    def _check_constant(self, node: Node, constant: Node, layout: Layout) -> None:
        """Accept a constant with different values for experts or positions."""


def sums_over_experts(graph: Graph) -> Iterator[SumOverExperts]:
    """Yield every sum over the results of dense experts once, in graph order for each GEMM."""
    seen: set[Node] = set()
    for gemm in map(dense_gemm, list(graph.nodes)):
        if gemm is None or gemm.kind == "summed" or gemm.pairs.positions == 1:
            continue
        for expert_sum in _sums_after(gemm):
            if expert_sum.node not in seen:
                seen.add(expert_sum.node)
                yield expert_sum


def _sums_after(gemm: DenseGemm) -> Iterator[SumOverExperts]:
    flow = PairFlow(gemm)

    def follow(user: Node) -> bool:
        return dense_gemm(user) is None and flow.follow(user)

    for node in walk([gemm.node], lambda node: sorted(node.users), follow, _MOST_NODES):
        sums = (_sum_of(user, node, flow.layout(node), gemm.pairs) for user in sorted(node.users))
        yield from (expert_sum for expert_sum in sums if expert_sum is not None)


def _sum_of(node: Node, value: Node, layout: Layout | None, pairs: Pairs) -> SumOverExperts | None:
    if layout is None or not pairs.has_pairs(layout) or not pairs.are_complete(layout):
        return None
    if is_call(node, aten.sum.dim_IntList):
        arguments = all_arguments(node)
        dims = [dim % len(layout.dimensions) for dim in arguments["dim"] or ()]
        is_cast = arguments["dtype"] not in (None, fake_value(value).dtype)
        if is_cast or [layout.dimensions[dim] for dim in dims] != [pairs.of_experts]:
            return None
        dimensions: list[Any] = list(layout.dimensions)
        dimensions[dims[0] : dims[0] + 1] = [()] * bool(arguments["keepdim"])
        return SumOverExperts(node, pairs, value, layout, Layout(tuple(dimensions)))
    gemm = dense_gemm(node)
    if gemm is None:
        return _weighted(node, value, layout, pairs) if is_call(node, aten.bmm.default) else None
    is_summed = gemm.kind == "summed" and gemm.rows is value and gemm.rows_layout == layout
    if not is_summed or gemm.added is not None:
        return None
    return SumOverExperts(node, pairs, value, layout, gemm.result_layout, gemm=gemm)


def _weighted(node: Node, value: Node, layout: Layout, pairs: Pairs) -> SumOverExperts | None:
    """Return a product of each position's weights [1, experts] and results [experts, features], or None."""
    left, right, _ = matrix_operands(node)
    batch, rows, columns = layout.dimensions
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
