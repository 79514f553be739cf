"""Replace every gather by prefetch, decode (for encoded banks), acquire and release, in the planned order.

Contract
    in    canonical graph and a plan with slot_stays, one per gather in the order of first reads
    out   scheduled graph without gathers; every prefetch names the event for which it waits
    a stay that matches no gather is an error, never a silent change of the schedule

Pseudo-code
    for each planned stay and its gather:
        acquire    right before the first reader of the bank and its lookup, followed by the views of the bank that
                   preceded it
        release    right after the last reader, or after the return of rows that a kernel fuses with it
        prefetch   right after the release of the slot's previous content; for a fresh slot, at the start of the graph
        if the bank's format has a decoder:
            decode     where a prefetch without decoder would be
            prefetch   as soon as an encoded buffer is free: right after the decode from there, or at the start of the
                       graph; but not before the prefetch of an earlier stay
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from moepass.passes.blocks.hoist_token_return import block_ends
from moepass.passes.blocks.sink_token_gather import first_expert_node
from moepass.passes.graph.nodes import copy_graph_module, graph_inputs
from moepass.passes.ir.bank_format import ENCODED_BUFFERS
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassError, PassResult, graph_pass
from moepass.passes.ir.slot_operations import acquire, decode, prefetch, release
from moepass.passes.schedule.assign_slots import Lifetime, lifetimes


@graph_pass(requires={"planned"}, provides={"scheduled"})
def schedule(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Insert the slot operations. Raises PassError if plan and graph do not match."""
    scheduled = copy_graph_module(module)
    stays = lifetimes(scheduled.graph)
    if [stay.bank for stay in stays] != [planned.bank for planned in plan.slot_stays]:
        raise PassError(
            f"the plan schedules banks {[planned.bank for planned in plan.slot_stays]}, but "
            f"the graph gathers {[stay.bank for stay in stays]}"
        )
    releases: list[Node] = []
    # The last decodes, one for each encoded buffer.
    decodes: deque[Node] = deque()
    start = earliest = graph_inputs(scheduled.graph)[-1] if stays else None
    ends = block_ends(scheduled.graph)
    for stay, planned in zip(stays, plan.slot_stays, strict=True):
        after = None if planned.after is None else releases[planned.after]
        assert start is not None
        assert earliest is not None
        position = start if after is None else after
        slot, shards = planned.slot, stay.gather.args[0]
        if plan.bank(planned.bank).format.is_encoded:
            if len(decodes) == ENCODED_BUFFERS:
                earliest = max(earliest, decodes.popleft())
            earliest = copied = _insert_after(max(start, earliest), stay, slot, prefetch, shards, after=None)
            filled = _insert_after(max(position, copied), stay, slot, decode, copied, after=after)
            decodes.append(filled)
        else:
            filled = _insert_after(position, stay, slot, prefetch, shards, after=after)
            earliest = max(earliest, filled)
        if after is None:
            # Fresh slots are filled in the order in which their banks are needed.
            start = filled
        tensors = _insert_acquire(stay, slot, filled)
        last = ends.get(stay.last_reader, stay.last_reader)
        releases.append(_insert_after(last, stay, slot, release, tensors))
    for stay in stays:
        scheduled.graph.erase_node(stay.gather)
    scheduled.recompile()
    return PassResult(scheduled, plan, matches=tuple(planned.block for planned in plan.slot_stays))


def _insert_after(
    position: Node, stay: Lifetime, slot: int, operation: Callable[..., Any], argument: Any, **kwargs: Node | None
) -> Node:
    graph = position.graph
    with graph.inserting_after(position):
        node = graph.call_function(operation, (argument,), {"bank": stay.bank, "slot": slot, **kwargs})
    node.meta["moepass_block"] = stay.block
    return node


def _insert_acquire(stay: Lifetime, slot: int, filled: Node) -> Node:
    graph = filled.graph
    begin = first_expert_node(stay.first_reader)
    with graph.inserting_before(begin):
        node = graph.call_function(acquire, (filled,), {"bank": stay.bank, "slot": slot})
    node.meta = dict(stay.gather.meta)
    stay.gather.replace_all_uses_with(node)
    for view in stay.views:
        begin.prepend(view)
    return node
