"""Write the GEMMs of experts that have as many slots each as grouped GEMMs of all slots.

`bmm(slots [experts, slots of each, in], weights [experts, in, out])` is a grouped GEMM of [experts · slots, in], where
all experts have as many rows. So the passes that know grouped GEMMs know these as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.dense.dense_gemms import DenseGemm, dense_gemm
from moepass.passes.dense.pair_layouts import Pairs, kept
from moepass.passes.dense.read_results import Forward
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

# Behind the last GEMM, before slots are looked up, or sent back.
_MOST_STEPS = 30


def last_gemms(graph: Graph) -> Iterator[DenseGemm]:
    """The GEMMs with the weights of all experts, slot by slot, that no other one of theirs follows."""
    for node in list(graph.nodes):
        gemm = dense_gemm(node)
        if gemm is not None and gemm.kind == "batched" and gemm.experts > 1 and gemm.places != 1:
            rules = Forward(node, gemm.result(Pairs(gemm.experts, gemm.places)))
            if not _feeds_another(node, rules):
                yield gemm


def _feeds_another(start: Node, rules: Forward) -> bool:
    def is_gemm(node: Node) -> bool:
        return node is not start and dense_gemm(node) is not None

    return any(map(is_gemm, descendants(start, follow=lambda user: is_gemm(user) or rules.follow(user), stop=is_gemm)))


def group_slots(graph: Graph, gemm: DenseGemm) -> Node:
    """Let what reads the results of `gemm` read those of grouped GEMMs: the last of these. Raises NotThisForm; the
    graph is then as before.
    """
    pairs = Pairs(gemm.experts, gemm.places)
    result, layout = _last_alone(gemm, pairs)
    writer = GraphWriter(graph, result)
    lookups: dict[Node, Node] = {}
    try:
        with graph.inserting_before(result):
            rows = RowsOfPairs(writer, pairs, _all_rows(writer, pairs, gemm))
            of_all = rows.write(result, layout)
            written = _in_place(writer, of_all, result, layout, pairs)
        for user in list(result.users):
            with graph.inserting_before(user):
                found = _looked_up(writer, user, result, layout, of_all, pairs)
            if found is not None:
                lookups[user] = found
    except NotThisForm:
        writer.erase()
        raise
    for user, found in lookups.items():
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    result.replace_all_uses_with(written)
    erase_unread(graph, result)
    writer.erase_unread()
    return rows.gemms[gemm.node]


def _last_alone(gemm: DenseGemm, pairs: Pairs) -> tuple[Node, Layout]:
    """The last value behind `gemm` that nothing else than one operation on every slot alone reads, and where experts
    and slots lie in it.
    """
    node = gemm.node
    rules = Forward(node, gemm.result(pairs))
    found = node, gemm.result(pairs)
    for _ in range(_MOST_STEPS):
        if len(node.users) != 1:
            break
        (node,) = node.users
        if not isinstance(fake_value(node), torch.Tensor) or not rules.follow(node):
            break
        layout = rules.layout(node)
        if layout is None:
            break
        if layout.dimensions[0] == pairs.of_all or {pairs.of_experts, pairs.of_places} <= {*layout.dimensions}:
            found = node, layout
    return found


def _looked_up(writer: GraphWriter, node: Node, table: Node, layout: Layout, rows: Node, pairs: Pairs) -> Node | None:
    """`node` as a lookup in `rows` [experts · slots, features], where it is one of whole slots in `table`, which has an
    expert and a slot in two dimensions; else None.
    """
    front = len(layout.dimensions) - len(kept(layout))
    if front != 2 or {*layout.dimensions[:2]} != {pairs.of_experts, pairs.of_places}:
        return None
    given = all_arguments(node)
    if is_call(node, aten.index.Tensor) and given["self"] is table:
        ids = [one for one in given["indices"] if one is not None]
        if len(ids) != 2 or None in given["indices"][:2] or any(not _is_number(one) for one in ids):
            return None
        numbers = writer.emit(aten.index.Tensor, _numbers(writer, table, layout, pairs), ids)
    elif is_call(node, aten.gather.default) and given["self"] is table:
        index, dim = given["index"], given["dim"] % len(layout.dimensions)
        sizes = [fake_value(one).shape[front:] for one in (index, table)]
        if dim >= front or sizes[0] != sizes[1] or not all(is_flat(index, one) for one in kept(layout)):
            return None
        for _ in kept(layout):
            index = writer.emit(aten.select.int, index, -1, 0)
        numbers = writer.emit(aten.gather.default, _numbers(writer, table, layout, pairs), dim, index)
    else:
        return None
    found = writer.emit(aten.index.Tensor, rows, [numbers])
    shapes = [[*map(size_expression, fake_value(one).shape)] for one in (found, node)]
    return found if shapes[0] == shapes[1] else None


def lookups_of_gathers(graph: Graph) -> None:
    """Write what `gather` takes from whole rows of a matrix as lookups of rows."""
    for node in list(graph.nodes):
        if not is_call(node, aten.gather.default) or fake_value(node).dim() != 2:
            continue
        given = all_arguments(node)
        index, table = given["index"], given["self"]
        sizes = [fake_value(one).shape[1] for one in (index, table)]
        if given["dim"] % 2 != 0 or sizes[0] != sizes[1] or not is_flat(index, 1) or sizes[0] == 1:
            continue
        writer = GraphWriter(graph, node)
        with graph.inserting_before(node):
            rows = writer.emit(aten.index.Tensor, table, [writer.emit(aten.select.int, index, 1, 0)])
        node.replace_all_uses_with(rows)
        erase_unread(graph, node)


def _is_number(node: Node) -> bool:
    return fake_value(node).dtype in (torch.int64, torch.int32)


def _numbers(writer: GraphWriter, table: Node, layout: Layout, pairs: Pairs) -> Node:
    """The row of each expert's slots, as `table` has these in its first two dimensions."""
    sizes = [writer.size(table, dim) for dim in range(2)]
    is_turned = layout.dimensions[0] == pairs.of_places
    every = writer.arange(writer.product(*sizes), fake_value(table).device)
    numbers = writer.viewed(every, sizes[::-1] if is_turned else sizes)
    return writer.emit(aten.permute.default, numbers, [1, 0]) if is_turned else numbers


def _all_rows(writer: GraphWriter, pairs: Pairs, gemm: DenseGemm) -> PairRows:
    device = fake_value(gemm.node).device
    places = writer.size(gemm.rows, gemm.batch + gemm.is_turned)
    count = writer.product(places, pairs.experts)
    numbers = []
    for size, dim in ((pairs.experts, 1), (places, 0)):
        column = writer.emit(aten.unsqueeze.default, writer.arange(size, device), dim)
        wide = writer.emit(aten.expand.default, column, [pairs.experts, places])
        numbers.append(writer.viewed(wide, [count]))
    each = writer.emit(aten.full.default, [pairs.experts], places, dtype=torch.int64, device=device)
    ends = writer.emit(prims.convert_element_type.default, writer.emit(aten.cumsum.default, each, 0), torch.int32)
    return PairRows(count, numbers[0], numbers[1], ends, are_all=True)


def _in_place(writer: GraphWriter, rows: Node, result: Node, layout: Layout, pairs: Pairs) -> Node:
    """`rows` [experts · slots, features] as the dimensions of `result` have them."""
    shape: list[Any] = [writer.size(result, dim) for dim in range(len(layout.dimensions))]
    if layout.dimensions[0] == pairs.of_all:
        return writer.viewed(rows, shape)
    where = [layout.dimensions.index(one) for one in (pairs.of_experts, pairs.of_places) if one in layout.dimensions]
    others = kept(layout)
    if len(where) != 2 or len(where) + len(others) != len(shape):
        raise NotThisForm(f"{named(result)} has its slots taken apart")
    order = [*where, *others]
    source = writer.viewed(rows, [shape[dim] for dim in order])
    back = [order.index(dim) for dim in range(len(order))]
    if back == sorted(back):
        return source
    turned = writer.emit(aten.permute.default, source, back)
    strides = [[*map(size_expression, fake_value(one).stride())] for one in (turned, result)]
    # What follows was captured for values that lie as they were computed.
    is_alike = strides[0] == strides[1]
    return turned if is_alike else writer.emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
