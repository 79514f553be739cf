"""Walk from a value to what it is computed from, within one block."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from moepass.passes.blocks.expert_stack import is_expert_stack
from moepass.passes.graph.collectives import Collective, collective_of
from moepass.passes.graph.nodes import fake_value, is_call
from moepass.passes.graph.not_this_form import NotThisForm
from moepass.passes.graph.source_lines import named
from moepass.passes.parallel.match.near_experts import MOST_NODES

aten, prims = torch.ops.aten, torch.ops.prims


def walk_back(
    root: Node,
    place: dict[Node, int],
    most: int,
    *,
    stop_at_inputs_of: Callable[[Collective], bool] = lambda found: False,
    stop_at: frozenset[Node] = frozenset(),
) -> tuple[list[Node], list[Collective], set[Node]]:
    """Everything that `root` is computed from: nodes in host order, the collectives among them, and where it begins.

    Does not go beyond `stop_at`, inputs of the graph, constants, and the inputs of collectives that
    `stop_at_inputs_of` names (their split sizes are followed).
    """
    leaves: set[Node] = set()
    stops = set(stop_at)
    heap = [(-place[root], root)]
    queued = {root}
    region: list[Node] = []
    exchanges: list[Collective] = []
    while heap:
        _, node = heapq.heappop(heap)
        if node in stops or node.op in ("placeholder", "get_attr") or is_expert_stack(node):
            leaves.add(node)
            continue
        region.append(node)
        if len(region) > most:
            raise NotThisForm(
                f"what {named(root)} is computed from cannot be told apart from the rest of the model: more than "
                f"{most} operations lead to it without an exchange"
            )
        inputs = list(node.all_input_nodes)
        collective = collective_of(node)
        if collective is not None:
            exchanges.append(collective)
            if stop_at_inputs_of(collective):
                stops.add(collective.input if collective.is_float else reshaped(collective.input))
        for used in inputs:
            if used not in queued:
                queued.add(used)
                heapq.heappush(heap, (-place[used], used))
    region.reverse()
    exchanges.reverse()
    return region, exchanges, leaves


_SAME_ORDER = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim)


_CASTS = (aten._to_copy.default, prims.convert_element_type.default)
# Types that hold every count.
_COUNT_TYPES = (torch.int32, torch.int64)


def reshaped(counts: Node) -> Node:
    """The counts before they were seen in another shape, or turned into whole numbers of another type that holds them:
    a rank may read its own sizes from there.
    """
    while True:
        source = counts.all_input_nodes[0] if is_call(counts, *_SAME_ORDER, *_CASTS) else None
        if source is None:
            return counts
        is_exact = all(fake_value(node).dtype in _COUNT_TYPES for node in (source, counts))
        is_there = fake_value(source).device == fake_value(counts).device
        if is_call(counts, *_CASTS) and not (is_exact and is_there):
            return counts
        counts = source


def check_leaves(leaves: set[Node], place: dict[Node, int]) -> None:
    """Beside its sources and expert tensors a block may begin with sizes and constants: what is known here."""
    for leaf in sorted(leaves, key=place.__getitem__):
        if leaf.op != "get_attr" and isinstance(fake_value(leaf), torch.Tensor):
            raise NotThisForm(
                f"it depends on {named(leaf)}, whose values are not known when the graph is compiled; expected its "
                "rows and counts, its router and the parameters of its GEMMs alone, and constants for everything "
                "else"
            )


def ancestors(node: Node, beyond: int = -1, place: dict[Node, int] | None = None) -> Iterable[Node]:
    """Nearest first, and no more than MOST_NODES; all that stand behind place `beyond` where `place` is given."""
    pending, seen = deque([node]), {node}
    while pending and (place is not None or len(seen) < MOST_NODES):
        current = pending.popleft()
        yield current
        for used in current.all_input_nodes:
            if used not in seen and (place is None or place[used] > beyond):
                seen.add(used)
                pending.append(used)
