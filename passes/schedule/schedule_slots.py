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
        decode     right after the prefetch, if the bank's format has a decoder
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from moepass.passes.blocks.hoist_token_return import block_ends
from moepass.passes.blocks.sink_token_gather import with_lookup
from moepass.passes.graph.nodes import copy_graph_module, graph_inputs
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
    start = graph_inputs(scheduled.graph)[-1] if stays else None
    ends = block_ends(scheduled.graph)
    for stay, planned in zip(stays, plan.slot_stays, strict=True):
        after = None if planned.after is None else releases[planned.after]
        position = start if after is None else after
        assert position is not None
        filled = _insert_after(position, stay, planned.slot, prefetch, stay.gather.args[0], after=after)
        if plan.bank(planned.bank).format.is_encoded:
            filled = _insert_after(filled, stay, planned.slot, decode, filled)
        if after is None:
            # Fresh slots are filled in the order in which their banks are needed.
            start = filled
        tensors = _insert_acquire(stay, planned.slot, filled)
        last = ends.get(stay.last_reader, stay.last_reader)
        releases.append(_insert_after(last, stay, planned.slot, release, tensors))
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
    begin = with_lookup(stay.first_reader)
    with graph.inserting_before(begin):
        node = graph.call_function(acquire, (filled,), {"bank": stay.bank, "slot": slot})
    node.meta = dict(stay.gather.meta)
    stay.gather.replace_all_uses_with(node)
    for view in stay.views:
        begin.prepend(view)
    return node
