"""Find the communication that brings the rows of an expert GEMM, and the one that takes its results.

Tensor and data parallelism use collectives too. Between an expert GEMM and its own collectives, rows are only moved,
masked, weighted and added; nothing mixes or normalises their features.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Node

from moepass.passes.graph.collectives import Communication, collective_of, communication_of
from moepass.passes.graph.nodes import fake_value, is_call, several
from moepass.passes.graph.written_inputs import writes_to_inputs
from moepass.passes.ops.traits import MOVES, Trait, base_operation, has_trait, is_view
from moepass.passes.ops.walk import ancestors, descendants, origin

aten = torch.ops.aten

# [Empirical] The largest known block has about 80 nodes, and 11 nodes for each rank that read and check split sizes. A
# walk that meets many more nodes has left the block.
MOST_NODES = 400
MOST_NODES_PER_RANK = 32

_MIXING = (Trait.MATMUL, Trait.GROUPED_MATMUL, Trait.NORM)


def moves_rows(node: Node) -> bool:
    """Return whether `node` moves, copies or casts rows, or some of them, and computes nothing."""
    is_move = has_trait(node, *MOVES, Trait.CAST) or is_call(node, aten.masked_select.default, aten.copy.default)
    return is_move or is_view(node)


def is_new_memory(node: Node) -> bool:
    """Return whether `node` is memory filled with one number, or uninitialised memory."""
    return has_trait(node, Trait.FILL, Trait.FILL_LIKE, Trait.EMPTY)


def most_nodes(ranks: int) -> int:
    return MOST_NODES + MOST_NODES_PER_RANK * ranks


def first_communication_after(gemm: Node, width: int, most: int = MOST_NODES) -> Communication | None:
    """Return the first communication that the rows [., width] of `gemm` reach within `most` nodes."""

    def has_rows(node: Node) -> bool:
        return communication_of(node) is None and keeps_features(node, width)

    reached: list[Communication] = []
    for node in descendants(gemm, follow=has_rows, most=most):
        for user in node.users:
            collective, communication = collective_of(user), communication_of(user)
            # A collective also reads sizes; it sends only its input.
            if communication is not None and (collective is None or collective.input is node):
                reached.append(communication)
    return min(reached, key=lambda communication: communication.node, default=None)


def keeps_features(node: Node, width: int) -> bool:
    """Return whether `node` moves, masks, weights or adds rows [., width] without mixing their features."""
    mixes = has_trait(node, *_MIXING) or base_operation(node) in ("mean", "pow", "embedding", "rsqrt")
    if node.op != "call_function" or mixes:
        return False
    if is_call(node, aten.mul.Tensor, aten.div.Tensor) and any(map(_is_row_statistic, node.all_input_nodes)):
        return False  # a norm is outside the block, and the next block has its own collectives
    values = several(fake_value(node))  # a split has several results
    return all(isinstance(item, torch.Tensor) and is_size(_features(item, node), width) for item in values)


def _features(value: torch.Tensor, node: Node) -> Any:
    """Return the last size of the result of `node`; for views the last that is not 1, since einsum appends ones."""
    return next((size for size in reversed(value.shape) if not (is_view(node) and is_size(size, 1))), None)


def _is_row_statistic(node: Node) -> bool:
    source = origin(node, passes=lambda step: is_view(step) or has_trait(step, Trait.CAST))
    return is_call(source, aten.rsqrt.default, aten.sqrt.default)


def is_size(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def communications_before(*starts: Node) -> list[Communication]:
    """Return the communication from which the rows or counts `starts` of a GEMM come, nearest first."""
    walks = (ancestors(start, stop=lambda node: not _passes_on(node), most=MOST_NODES) for start in starts)
    communications = map(communication_of, dict.fromkeys(itertools.chain(*walks)))
    return [communication for communication in communications if communication is not None]


def _passes_on(node: Node) -> bool:
    """Return whether rows, indices or counts were moved or computed by `node`."""
    if moves_rows(node) or is_call(node, aten.histc.default) or communication_of(node) is not None:
        return True
    values = several(fake_value(node))
    # Indices and counts may be computed in any way. The scores of the router are floats, and are not followed.
    return node.op == "call_function" and not any(
        isinstance(item, torch.Tensor) and item.is_floating_point() for item in values
    )


def written_input(arriving: Communication) -> Node | None:
    """Return the graph input to which the result of `arriving` is written, possibly moved, or None."""
    writes = {node: memory for memory, nodes in writes_to_inputs(arriving.node.graph).items() for node in nodes}
    moved = descendants(arriving.node, follow=lambda user: user in writes or moves_rows(user))
    return next((writes[node] for node in moved if node in writes), None)
