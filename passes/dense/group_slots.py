"""Rewrite batched GEMMs of experts with equally many slots as grouped GEMMs over all slots.

`bmm([experts, slots per expert, in], [experts, in, out])` is a grouped GEMM of [experts · slots, in] with equal groups,
the form that later passes recognise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs, feature_dims
from moepass.passes.dense.read_results import PairFlow
from moepass.passes.dense.rows_of_pairs import PairRows, RowsOfPairs
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import have_equal_shapes, size_expressions
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm, refuse
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.walk import descendants
from moepass.passes.rows.row_layout import Layout
from moepass.passes.rows.row_rules import is_flat

aten = torch.ops.aten

# Limit for the operations between the last GEMM and the lookup or exchange of its slots.
_MOST_STEPS = 30


def last_gemms(graph: Graph) -> Iterator[DenseGemm]:
    """Yield the batched GEMMs with the weights of all experts that no other GEMM of experts follows."""
    for gemm in map(dense_gemm, list(graph.nodes)):
        is_batched = gemm is not None and gemm.kind == "batched" and gemm.pairs.positions != 1
        if gemm is not None and is_batched and not _feeds_other_gemm(gemm):
            yield gemm


def _feeds_other_gemm(gemm: DenseGemm) -> bool:
    flow = PairFlow(gemm)

    def is_other_gemm(node: Node) -> bool:
        return node is not gemm.node and dense_gemm(node) is not None

    def follow(user: Node) -> bool:
        return is_other_gemm(user) or flow.follow(user)

    return any(map(is_other_gemm, descendants(gemm.node, follow=follow, stop=is_other_gemm)))


def group_slots(graph: Graph, gemm: DenseGemm) -> dict[Node, Node]:
    """Replace `gemm` and the GEMMs before it by grouped GEMMs, and return the new GEMM of each.

    NotThisForm leaves the graph unchanged.
    """
    pairs = gemm.pairs
    result, layout = _last_of_chain(gemm)
    writer = GraphWriter(graph, result)
    lookups: dict[Node, Node] = {}
    try:
        with graph.inserting_before(result):
            row_writer = RowsOfPairs(writer, pairs, _all_rows(writer, gemm))
            rows = row_writer.write(result, layout)
            written = _like_result(writer, rows, result, layout, pairs)
        for user in list(result.users):
            with graph.inserting_before(user):
                lookup = _as_lookup(writer, user, result, layout, rows, pairs)
            if lookup is not None:
                lookups[user] = lookup
    except NotThisForm:
        writer.erase()
        raise
    for user, lookup in lookups.items():
        user.replace_all_uses_with(lookup)
        graph.erase_node(user)
    result.replace_all_uses_with(written)
    erase_unread(graph, result)
    writer.erase_unread()
    return row_writer.gemms


def _last_of_chain(gemm: DenseGemm) -> tuple[Node, Layout]:
    """Follow the chain of single readers of `gemm`; return the last value with experts and slots, and its layout."""
    pairs, flow = gemm.pairs, PairFlow(gemm)
    node, result = gemm.node, (gemm.node, gemm.result_layout)
    for _ in range(_MOST_STEPS):
        if len(node.users) != 1:
            break
        (node,) = node.users
        layout = flow.layout(node) if flow.follow(node) else None
        if layout is None:
            break
        if layout.dimensions[0] == pairs.of_pairs or {pairs.of_experts, pairs.of_positions} <= {*layout.dimensions}:
            result = node, layout
    return result


def _as_lookup(writer: GraphWriter, node: Node, table: Node, layout: Layout, rows: Node, pairs: Pairs) -> Node | None:
    """Return a lookup in `rows` [experts · slots, features] for a lookup `node` of full slots in `table`, or None."""
    front = len(layout.dimensions) - len(feature_dims(layout))
    if front != 2 or {*layout.dimensions[:2]} != {pairs.of_experts, pairs.of_positions}:
        return None
    arguments = all_arguments(node)
    if is_call(node, aten.index.Tensor) and arguments["self"] is table:
        ids = [each for each in arguments["indices"] if each is not None]
        are_numbers = all(fake_value(each).dtype in (torch.int64, torch.int32) for each in ids)
        if len(ids) != 2 or None in arguments["indices"][:2] or not are_numbers:
            return None
        numbers = writer.emit(aten.index.Tensor, _numbers(writer, table, layout, pairs), ids)
    elif is_call(node, aten.gather.default) and arguments["self"] is table:
        index = _ids_of_gather(writer, node, front)
        if index is None:
            return None
        dim = arguments["dim"] % len(layout.dimensions)
        numbers = writer.emit(aten.gather.default, _numbers(writer, table, layout, pairs), dim, index)
    else:
        return None
    lookup = writer.emit(aten.index.Tensor, rows, [numbers])
    return lookup if have_equal_shapes(lookup, node) else None


def lookups_of_gathers(graph: Graph) -> None:
    """Rewrite each `gather` of complete rows of a matrix as a lookup of rows."""
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        shape = size_expressions(fake_value(node).shape)
        if len(shape) != 2 or shape[1] == 1:
            continue
        writer = GraphWriter(graph, node)
        with graph.inserting_before(node):
            ids = _ids_of_gather(writer, node, 1)
            if ids is not None:
                node.replace_all_uses_with(writer.emit(aten.index.Tensor, all_arguments(node)["self"], [ids]))
                erase_unread(graph, node)


def _ids_of_gather(writer: GraphWriter, node: Node, front: int) -> Node | None:
    """Return the index of a `gather` of complete rows, without features; None if features, behind `front`, differ."""
    arguments = all_arguments(node)
    index, table = arguments["index"], arguments["self"]
    rank = fake_value(table).dim()
    sizes = [fake_value(each).shape[front:] for each in (index, table)]
    if (
        arguments["dim"] % rank >= front
        or sizes[0] != sizes[1]
        or not all(is_flat(index, dim) for dim in range(front, rank))
    ):
        return None
    for _ in range(front, rank):
        index = writer.emit(aten.select.int, index, front, 0)
    return cast(Node, index)


def _numbers(writer: GraphWriter, table: Node, layout: Layout, pairs: Pairs) -> Node:
    """Return the row number of each slot, in the first two dimensions of `table`."""
    sizes = [writer.size(table, dim) for dim in range(2)]
    every = writer.arange(writer.product(*sizes), fake_value(table).device)
    if layout.dimensions[0] == pairs.of_experts:
        return writer.viewed(every, sizes)
    return writer.permuted(writer.viewed(every, sizes[::-1]), [1, 0])


def _all_rows(writer: GraphWriter, gemm: DenseGemm) -> PairRows:
    device = fake_value(gemm.node).device
    experts, positions = gemm.experts, writer.size(gemm.rows, gemm.batch + gemm.weights_on_left)
    count = writer.product(positions, experts)
    row = writer.emit(aten.unsqueeze.default, writer.arange(positions, device), 0)
    position_of_row = writer.viewed(writer.emit(aten.expand.default, row, [experts, positions]), [count])
    expert_of_row = writer.group_of_each_row(experts, positions, device)
    ends = writer.ends_of_even_groups(experts, positions, device)
    return PairRows(count, expert_of_row, position_of_row, ends, are_all=True)


def _like_result(writer: GraphWriter, rows: Node, result: Node, layout: Layout, pairs: Pairs) -> Node:
    """Return `rows` [experts · slots, features] with the shape and strides of `result`."""
    shape: list[Any] = [writer.size(result, dim) for dim in range(len(layout.dimensions))]
    if layout.dimensions[0] == pairs.of_pairs:
        return writer.viewed(rows, shape)
    dims = [layout.dimensions.index(key) for key in (pairs.of_experts, pairs.of_positions) if key in layout.dimensions]
    order = [*dims, *feature_dims(layout)]
    if len(dims) != 2 or len(order) != len(shape):
        refuse(result, "has split dimensions of slots")
    source = writer.viewed(rows, [shape[dim] for dim in order])
    permuted = writer.permuted(source, [order.index(dim) for dim in range(len(order))])
    # Later operations were captured for the strides of `result`.
    strides = [size_expressions(fake_value(tensor).stride()) for tensor in (permuted, result)]
    if permuted is source or strides[0] == strides[1]:
        return permuted
    return writer.emit(aten.clone.default, permuted, memory_format=torch.contiguous_format)
