"""Split every gather into prefetch, decode where there is one, acquire and release, in the order that the plan decided.

Contract
    in    canonical graph and a plan with slot_stays, one per gather in the order in which they are first read
    out   scheduled graph: no gather left; every prefetch names the event that it waits for
    a stay that fits no gather is an error, never a silent change of the schedule

Pseudo-code
    for each planned stay and its gather:
        acquire right before the first reader of the bank and its lookup; the views of the bank that stand in front of
        that follow it
        release right after the last reader, and the return of rows that a kernel does with it
        prefetch right after the release of the slot's previous content; at the start of the graph for a fresh slot
        decode right after the prefetch, where the bank's format has a decoder
"""

from __future__ import annotations

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
    """Insert the slot operations. Raises PassError where plan and graph do not belong together."""
    scheduled = copy_graph_module(module)
    stays = lifetimes(scheduled.graph)
    if [stay.bank for stay in stays] != [planned.bank for planned in plan.slot_stays]:
        raise PassError(
            f"the plan schedules banks {[planned.bank for planned in plan.slot_stays]}, "
            f"the graph gathers {[stay.bank for stay in stays]}"
        )
    releases: list[Node] = []
    start = _start_of_graph(scheduled)
    ends = block_ends(scheduled.graph)
    for stay, planned in zip(stays, plan.slot_stays, strict=True):
        after = None if planned.after is None else releases[planned.after]
        position = start if after is None else after
        filled = _insert_prefetch(scheduled, stay, planned.slot, after, position)
        if plan.bank(planned.bank).format.is_encoded:
            filled = _insert_decode(scheduled, stay, planned.slot, filled)
        if after is None:
            # Fresh slots fill in the order in which their banks are needed.
            start = filled
        tensors = _insert_acquire(scheduled, stay, planned.slot, filled)
        last = ends.get(stay.last_reader, stay.last_reader)
        releases.append(_insert_release(scheduled, stay, planned.slot, tensors, last))
    for stay in stays:
        scheduled.graph.erase_node(stay.gather)
    scheduled.recompile()
    return PassResult(scheduled, plan, matches=tuple(planned.block for planned in plan.slot_stays))


def _start_of_graph(module: GraphModule) -> Node | None:
    inputs = graph_inputs(module.graph)
    return inputs[-1] if inputs else None


def _insert_prefetch(module: GraphModule, stay: Lifetime, slot: int, after: Node | None, position: Node | None) -> Node:
    graph = module.graph
    assert position is not None, "a gather has at least its shard as an input"
    with graph.inserting_after(position):
        node = graph.call_function(prefetch, (stay.gather.args[0],), {"bank": stay.bank, "slot": slot, "after": after})
    node.meta["moepass_block"] = stay.block
    return node


def _insert_decode(module: GraphModule, stay: Lifetime, slot: int, copied: Node) -> Node:
    graph = module.graph
    with graph.inserting_after(copied):
        node = graph.call_function(decode, (copied,), {"bank": stay.bank, "slot": slot})
    node.meta["moepass_block"] = stay.block
    return node


def _insert_acquire(module: GraphModule, stay: Lifetime, slot: int, filled: Node) -> Node:
    graph = module.graph
    begin = with_lookup(stay.first_reader)
    with graph.inserting_before(begin):
        node = graph.call_function(acquire, (filled,), {"bank": stay.bank, "slot": slot})
    node.meta = dict(stay.gather.meta)
    stay.gather.replace_all_uses_with(node)
    for view in stay.views:
        begin.prepend(view)
    return node


def _insert_release(module: GraphModule, stay: Lifetime, slot: int, tensors: Node, last: Node) -> Node:
    graph = module.graph
    with graph.inserting_after(last):
        node = graph.call_function(release, (tensors,), {"bank": stay.bank, "slot": slot})
    node.meta["moepass_block"] = stay.block
    return node
