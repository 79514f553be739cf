"""Rewrite batched GEMMs of experts with equally many slots as grouped GEMMs over all slots.

`bmm([experts, slots per expert, in], [experts, in, out])` is a grouped GEMM of [experts · slots, in] with equal groups,
the form that later passes recognise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs, feature_dims
from moepass.passes.dense.read_results import PairFlow
from moepass.passes.dense.rows_of_pairs import PairRows, RowsOfPairs
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.input_sizes import size_expression
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.ops.arguments import all_arguments
from moepass.passes.ops.walk import descendants
from moepass.passes.rows.row_layout import Layout
from moepass.passes.rows.row_rules import is_flat

aten, prims = torch.ops.aten, torch.ops.prims

# Limit for the operations between the last GEMM and the lookup or exchange of its slots.
_MOST_STEPS = 30


def last_gemms(graph: Graph) -> Iterator[DenseGemm]:
    """Yield the batched GEMMs with the weights of all experts that no other GEMM of experts follows."""
    for node in list(graph.nodes):
        gemm = dense_gemm(node)
        if gemm is not None and gemm.kind == "batched" and gemm.experts > 1 and gemm.positions != 1:
            flow = PairFlow(node, gemm.result_layout(Pairs(gemm.experts, gemm.positions)))
            if not _feeds_other_gemm(node, flow):
                yield gemm


def _feeds_other_gemm(start: Node, flow: PairFlow) -> bool:
    def is_gemm(node: Node) -> bool:
        return node is not start and dense_gemm(node) is not None

    return any(map(is_gemm, descendants(start, follow=lambda user: is_gemm(user) or flow.follow(user), stop=is_gemm)))


def group_slots(graph: Graph, gemm: DenseGemm) -> Node:
    """Replace `gemm` and the GEMMs before it by grouped GEMMs; return the last. NotThisForm leaves the graph as is."""
    pairs = Pairs(gemm.experts, gemm.positions)
    result, layout = _last_of_chain(gemm, pairs)
    writer = GraphWriter(graph, result)
    lookups: dict[Node, Node] = {}
    try:
        with graph.inserting_before(result):
            row_writer = RowsOfPairs(writer, pairs, _all_rows(writer, pairs, gemm))
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
    return row_writer.gemms[gemm.node]


def _last_of_chain(gemm: DenseGemm, pairs: Pairs) -> tuple[Node, Layout]:
    """Follow the chain of single readers of `gemm`; return the last value with experts and slots, and its layout."""
    node = gemm.node
    flow = PairFlow(node, gemm.result_layout(pairs))
    result = node, gemm.result_layout(pairs)
    for _ in range(_MOST_STEPS):
        if len(node.users) != 1:
            break
        (node,) = node.users
        if not isinstance(fake_value(node), torch.Tensor) or not flow.follow(node):
            break
        layout = flow.layout(node)
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
        if len(ids) != 2 or None in arguments["indices"][:2] or any(not _is_number(each) for each in ids):
            return None
        numbers = writer.emit(aten.index.Tensor, _numbers(writer, table, layout, pairs), ids)
    elif is_call(node, aten.gather.default) and arguments["self"] is table:
        index, dim = arguments["index"], arguments["dim"] % len(layout.dimensions)
        sizes = [fake_value(each).shape[front:] for each in (index, table)]
        if dim >= front or sizes[0] != sizes[1] or not all(is_flat(index, each) for each in feature_dims(layout)):
            return None
        for _ in feature_dims(layout):
            index = writer.emit(aten.select.int, index, -1, 0)
        numbers = writer.emit(aten.gather.default, _numbers(writer, table, layout, pairs), dim, index)
    else:
        return None
    lookup = writer.emit(aten.index.Tensor, rows, [numbers])
    shapes = [[*map(size_expression, fake_value(each).shape)] for each in (lookup, node)]
    return lookup if shapes[0] == shapes[1] else None


def lookups_of_gathers(graph: Graph) -> None:
    """Rewrite each `gather` of complete rows of a matrix as a lookup of rows."""
    for node in list(graph.nodes):
        if not is_call(node, aten.gather.default) or fake_value(node).dim() != 2:
            continue
        arguments = all_arguments(node)
        index, table = arguments["index"], arguments["self"]
        sizes = [fake_value(tensor).shape[1] for tensor in (index, table)]
        if arguments["dim"] % 2 != 0 or sizes[0] != sizes[1] or not is_flat(index, 1) or sizes[0] == 1:
            continue
        writer = GraphWriter(graph, node)
        with graph.inserting_before(node):
            rows = writer.emit(aten.index.Tensor, table, [writer.emit(aten.select.int, index, 1, 0)])
        node.replace_all_uses_with(rows)
        erase_unread(graph, node)


def _is_number(node: Node) -> bool:
    return fake_value(node).dtype in (torch.int64, torch.int32)


def _numbers(writer: GraphWriter, table: Node, layout: Layout, pairs: Pairs) -> Node:
    """Return the row number of each slot, in the first two dimensions of `table`."""
    sizes = [writer.size(table, dim) for dim in range(2)]
    is_transposed = layout.dimensions[0] == pairs.of_positions
    every = writer.arange(writer.product(*sizes), fake_value(table).device)
    numbers = writer.viewed(every, sizes[::-1] if is_transposed else sizes)
    return writer.emit(aten.permute.default, numbers, [1, 0]) if is_transposed else numbers


def _all_rows(writer: GraphWriter, pairs: Pairs, gemm: DenseGemm) -> PairRows:
    device = fake_value(gemm.node).device
    positions = writer.size(gemm.rows, gemm.batch + gemm.weights_on_left)
    count = writer.product(positions, pairs.experts)
    numbers = []
    for size, dim in ((pairs.experts, 1), (positions, 0)):
        column = writer.emit(aten.unsqueeze.default, writer.arange(size, device), dim)
        wide = writer.emit(aten.expand.default, column, [pairs.experts, positions])
        numbers.append(writer.viewed(wide, [count]))
    sizes = writer.emit(aten.full.default, [pairs.experts], positions, dtype=torch.int64, device=device)
    ends = writer.emit(prims.convert_element_type.default, writer.emit(aten.cumsum.default, sizes, 0), torch.int32)
    return PairRows(count, numbers[0], numbers[1], ends, are_all=True)


def _like_result(writer: GraphWriter, rows: Node, result: Node, layout: Layout, pairs: Pairs) -> Node:
    """Return `rows` [experts · slots, features] with the shape and strides of `result`."""
    shape: list[Any] = [writer.size(result, dim) for dim in range(len(layout.dimensions))]
    if layout.dimensions[0] == pairs.of_pairs:
        return writer.viewed(rows, shape)
    dims = [layout.dimensions.index(key) for key in (pairs.of_experts, pairs.of_positions) if key in layout.dimensions]
    last_dims = feature_dims(layout)
    if len(dims) != 2 or len(dims) + len(last_dims) != len(shape):
        raise NotThisForm(f"{named(result)} has split dimensions of slots")
    order = [*dims, *last_dims]
    source = writer.viewed(rows, [shape[dim] for dim in order])
    inverse = [order.index(dim) for dim in range(len(order))]
    if inverse == sorted(inverse):
        return source
    permuted = writer.emit(aten.permute.default, source, inverse)
    strides = [[*map(size_expression, fake_value(tensor).stride())] for tensor in (permuted, result)]
    # Later operations were captured for the strides of `result`.
    is_aligned = strides[0] == strides[1]
    return permuted if is_aligned else writer.emit(aten.clone.default, permuted, memory_format=torch.contiguous_format)
