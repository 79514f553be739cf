"""Exchanges of slots [experts, capacity, width] become exchanges of rows [slots, width]: the same numbers, in order."""

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
    """Bring every AllToAll of slots before or behind expert GEMMs to rows; `ranks` are the most that it has."""
    if not any(map(_exchanges_slots, graph.nodes)):
        return
    near: dict[Node, None] = {}
    for match in find_blocks(graph, may_compute=True).matches:
        first, down = match.gemms[0], match.gemms[-1]
        after = first_communication_after(down.node, down.outer, most_nodes(ranks))
        arriving = communications_before(first.activations)
        near |= dict.fromkeys(one.node for one in (*arriving, after) if one is not None)
    for node in filter(_exchanges_slots, near):
        _flatten(graph, node)


def _exchanges_slots(node: Node) -> bool:
    one = collective_of(node)
    return one is not None and one.kind == "all_to_all" and one.is_float and fake_value(one.input).dim() > 2


def _flatten(graph: Graph, exchange: Node) -> None:
    one = collective_of(exchange)
    assert one is not None
    writer = GraphWriter(graph, one.node)
    with graph.inserting_before(one.node):
        *_, width = fake_value(one.input).shape
        rows = writer.emit(aten.reshape.default, one.input, [-1, width])
        inner: list[Any] = [writer.size(one.input, dim) for dim in range(1, fake_value(one.input).dim())]
        each = functools.reduce(writer.product, inner[:-1])
        receive, send = ([writer.product(size, each) for size in sizes] for sizes in (one.receive, one.send))
        exchanged = writer.emit(one.node.target, rows, receive, send, one.group_name)  # type: ignore[arg-type]
    with graph.inserting_before(one.result):
        waited = writer.emit(WAIT, exchanged)
        slots = writer.viewed(waited, [writer.size(one.result, 0), *inner])
    chain = [one.node]
    while chain[-1] is not one.result:
        chain += chain[-1].users  # it has one reader
    one.result.replace_all_uses_with(slots)
    # With the memory that it was written to, where torch.distributed was given some.
    written_to = [used for node in chain[1:] for used in node.all_input_nodes if used not in chain]
    for node in reversed(chain):
        if not node.users:
            graph.erase_node(node)
    for node in written_to:
        # Its size may be a length of what is exchanged.
        if node in graph.nodes:
            erase_unread(graph, node)
