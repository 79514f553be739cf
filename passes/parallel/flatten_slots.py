"""Conversion of exchanges of slots [experts, capacity, width] into exchanges of rows [slots, width]."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Graph, Node

from moepass.passes.blocks.detect import find_blocks
from moepass.passes.graph.collectives import WAIT, collective_of
from moepass.passes.graph.graph_writer import GraphWriter, erase_unread
from moepass.passes.graph.nodes import fake_value
from moepass.passes.parallel.match.near_experts import communications_before, first_communication_after, most_nodes

aten = torch.ops.aten


def flatten_exchanged_slots(graph: Graph, ranks: int) -> None:
    """Let every AllToAll of slots near expert GEMMs exchange rows. `ranks` is the size of the largest group."""
    if not any(map(_exchanges_slots, graph.nodes)):
        return
    near: dict[Node, None] = {}
    for match in find_blocks(graph, may_compute=True).matches:
        first, down = match.gemms[0], match.gemms[-1]
        after = first_communication_after(down.node, down.outer, most_nodes(ranks))
        arriving = communications_before(first.activations)
        near |= dict.fromkeys(call.node for call in (*arriving, after) if call is not None)
    for node in filter(_exchanges_slots, near):
        _flatten(graph, node)


def _exchanges_slots(node: Node) -> bool:
    call = collective_of(node)
    return call is not None and call.kind == "all_to_all" and call.is_float and fake_value(call.input).dim() > 2


def _flatten(graph: Graph, exchange: Node) -> None:
    call = collective_of(exchange)
    assert call is not None
    writer = GraphWriter(graph, call.node)
    with graph.inserting_before(call.node):
        *_, width = fake_value(call.input).shape
        rows = writer.emit(aten.reshape.default, call.input, [-1, width])
        inner: list[Any] = [writer.size(call.input, dim) for dim in range(1, fake_value(call.input).dim())]
        rows_per_slot = functools.reduce(writer.product, inner[:-1])
        receive, send = ([writer.product(size, rows_per_slot) for size in sizes] for sizes in (call.receive, call.send))
        exchanged = writer.emit(call.node.target, rows, receive, send, call.group_name)  # type: ignore[arg-type]
    with graph.inserting_before(call.result):
        waited = writer.emit(WAIT, exchanged)
        slots = writer.viewed(waited, [writer.size(call.result, 0), *inner])
    chain = [call.node]
    while chain[-1] is not call.result:
        chain += chain[-1].users  # it has one reader
    call.result.replace_all_uses_with(slots)
    # torch.distributed may write the result to given memory, which is erased too.
    written_to = [used for node in chain[1:] for used in node.all_input_nodes if used not in chain]
    for node in reversed(chain):
        if not node.users:
            graph.erase_node(node)
    for node in written_to:
        # The size of the memory may depend on the erased exchange.
        if node in graph.nodes:
            erase_unread(graph, node)
