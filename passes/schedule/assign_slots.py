"""Assign every bank to a slot, and to the release for which its prefetch waits.

Contract
    in    canonical graph
    out   the same graph, untouched
          `plan.strategy`, `reason`, `slots`, `slot_bytes` and `slot_stays`
          `plan.dispatch`, or a refusal if it was requested but is impossible

Pseudo-code
    if nothing is gathered: strategy resident
    for each gather in the order of first reads, with its first and last reader:
        assign the slot that has been free for longest; its prefetch waits for the release of the slot's last content
        if no slot is free when the gather is needed: raise, and say how many slots would be enough
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch.fx import Graph, GraphModule, Node

from moepass.models.homes import home_named
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import first_of_region, is_call, last_of_region, positions
from moepass.passes.ir.plan import Plan, SlotStay
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass
from moepass.passes.ir.slot_operations import gather
from moepass.passes.ops.traits import is_view, mutates
from moepass.passes.ops.walk import readers
from moepass.passes.schedule.dispatch import plan_dispatch


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """The host-order interval in which a gathered bank is read.

    Attributes:
        views: views before `first_reader`. They move no bytes and depend only on the gather, so they can be moved right
            before it
        first_reader, last_reader: for a region that runs in chunks of tokens, its first and last node
    """

    gather: Node
    bank: int
    block: str
    views: tuple[Node, ...]
    first_reader: Node
    last_reader: Node


@graph_pass(requires={"canonical"}, provides={"planned"})
def plan(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Choose strategy and slots.

    Raises PlanError if the ring has fewer slots than banks that are read at the same time.
    """
    dispatch, refusals = plan_dispatch(module, plan, context)
    plan = dataclasses.replace(plan, dispatch=dispatch, refusals=plan.refusals + refusals)
    stays = lifetimes(module.graph)
    if not stays:
        reason = (
            "every expert bank is already on the compute device"
            if plan.blocks
            else "the graph has no MoE block, so there is nothing to move"
        )
        if plan.banks:
            reason = "banks are read only outside recognised blocks, so they are gathered synchronously"
        reason = _with_what_stays(reason, module.graph, plan, context)
        decided = dataclasses.replace(plan, strategy="resident" if not plan.banks else "synchronous", reason=reason)
        return PassResult(module, decided, refusals=refusals)
    slot_stays = assign_slots(stays, positions(module.graph), context.slots)
    used = 1 + max(stay.slot for stay in slot_stays)
    decided = dataclasses.replace(
        plan,
        strategy="asyncep",
        reason=_with_what_stays(
            _reason(len(stays), used, {plan.bank(stay.bank).home for stay in stays}), module.graph, plan, context
        ),
        slots=used,
        slot_bytes=max(plan.bank(stay.bank).format.slot_bytes for stay in stays),
        slot_stays=tuple(slot_stays),
    )
    return PassResult(module, decided, matches=tuple(stay.block for stay in slot_stays), refusals=refusals)


def _reason(stays: int, slots: int, homes: set[str]) -> str:
    where = " or ".join(home_named(home).banks_there for home in sorted(homes))
    if slots == 1:
        return f"{stays} banks {where} and pass through 1 slot, which is refilled after each block"
    return f"{stays} banks {where} and stream through {slots} slots while other layers compute"


def _with_what_stays(reason: str, graph: Graph, plan: Plan, context: PassContext) -> str:
    """Append to `reason` how many collectives stay in the graph, and why."""
    kinds = Counter(communication.kind for communication in communications_of(graph))
    if not kinds:
        return reason
    number = kinds.total()
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    stay = f"{number} collective{'s' * (number > 1)} stay{'s' * (number == 1)} in the graph ({listed})"
    near = [refusal for refusal in plan.refusals if refusal.crosses_ranks]
    if near:
        more = f", and {len(near) - 1} more refusals" if len(near) > 1 else ""
        moved = "" if not plan.banks else f"{reason}; "
        return f"{moved}{stay}, because of {near[0].where}: {near[0].reason}{more}"
    if "eliminate_expert_parallelism" in context.disabled:
        return (
            f"{stay}, because pass eliminate_expert_parallelism is disabled"
            if plan.blocks and not plan.banks
            else f"{reason}; {stay}"
        )
    return f"{reason}; {stay}, none of them around experts that moepass recognises"


def lifetimes(graph: Graph) -> list[Lifetime]:
    """Return the gathers of a canonical graph in the order of their first reads."""
    order = positions(graph)
    stays = []
    for node in graph.nodes:
        if is_call(node, gather):
            users = sorted(readers(node), key=order.__getitem__)
            # copy_ returns a view of its target, but it reads its source.
            reading = [user for user in users if not is_view(user) or mutates(user)]
            first_reader, last_reader = first_of_region((reading or users)[0]), last_of_region(users[-1])
            views = tuple(view for view in users if order[view] < order[first_reader])
            bank = node.kwargs["bank"]
            assert isinstance(bank, int)
            block = str(node.meta.get("moepass_block", node.name))
            stays.append(Lifetime(node, bank, block, views, first_reader, last_reader))
    return sorted(stays, key=lambda stay: order[stay.first_reader])


def assign_slots(stays: list[Lifetime], order: dict[Node, int], slots: int) -> list[SlotStay]:
    """Assign slots in the order in which they become free.

    `order` are positions in host order, `slots` is the size of the ring.
    """
    freed_by: list[int | None] = []
    slot_stays: list[SlotStay] = []
    for position, stay in enumerate(stays):
        needed_at = order[stay.first_reader]
        if len(freed_by) < slots:
            slot, after = len(freed_by), None
            freed_by.append(position)
        else:
            slot = min(range(slots), key=lambda index: order[stays[freed_by[index]].last_reader])  # type: ignore[index]
            after = freed_by[slot]
            assert after is not None
            if order[stays[after].last_reader] >= needed_at:
                live = _live(stays, order, needed_at)
                raise PlanError(
                    f"slots={slots} is too few: block {stay.block} needs its bank while {live} banks are being read; "
                    f"use slots={live + 1} or more"
                )
            freed_by[slot] = position
        shards = tuple(shard.name for shard in stay.gather.all_input_nodes)
        slot_stays.append(SlotStay(stay.block, stay.bank, slot, after, shards))
    return slot_stays


def _live(stays: list[Lifetime], order: dict[Node, int], moment: int) -> int:
    return sum(order[stay.first_reader] < moment <= order[stay.last_reader] for stay in stays)
