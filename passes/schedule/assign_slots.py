"""Decide where every bank goes: which slot, and which release its prefetch waits for.

Contract
    in    canonical graph
    out   the same graph, untouched; `plan.strategy`, `reason`, `slots`, `slot_bytes`, `slot_stays`, and `dispatch`,
          or a refusal where it was asked for and cannot be

Pseudo-code
    if nothing is gathered: strategy resident
    for each gather in the order in which they are first read, with its first and last reader:
        give it the slot that has been free for longest; its prefetch follows the release of that slot's last content
        if no slot is free when the gather is needed: refuse, and say how many slots would do
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch.fx import Graph, GraphModule, Node

from moepass.models.homes import home_named
from moepass.passes.graph.collectives import communications_of
from moepass.passes.graph.nodes import first_of_region, is_call, is_view, last_of_region, mutates, positions, readers
from moepass.passes.ir.plan import Plan, SlotStay
from moepass.passes.ir.protocol import PassContext, PassResult, PlanError, graph_pass
from moepass.passes.ir.slot_operations import gather
from moepass.passes.schedule.dispatch import plan_dispatch


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """The host-order interval in which a gathered bank is read.

    `views` are those in front of `first_reader`: they move no byte and depend on the gather alone, so they may stand
    right in front of it, however early the model took them. What reads a bank for some tokens at a time reads it from
    the beginning of its region to the end.
    """

    gather: Node
    bank: int
    block: str
    views: tuple[Node, ...]
    first_reader: Node
    last_reader: Node


@graph_pass(requires={"canonical"}, provides={"planned"})
def plan(module: GraphModule, plan: Plan, context: PassContext) -> PassResult:
    """Choose strategy and slots. Raises PlanError where the ring has fewer slots than banks that are read at once."""
    dispatch, refusals = plan_dispatch(module, plan, context)
    plan = dataclasses.replace(plan, dispatch=dispatch, refusals=plan.refusals + refusals)
    stays = lifetimes(module.graph)
    if not stays:
        reason = (
            "every expert bank lies on the compute device already"
            if plan.blocks
            else "the graph has no MoE block, so there is nothing to move"
        )
        if plan.banks:
            reason = "banks are read, but only outside recognised blocks: they are gathered synchronously"
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
        return f"{stays} banks {where} and pass through 1 slot, refilled when the block before is done"
    return f"{stays} banks {where} and stream through {slots} slots while other layers compute"


def _with_what_stays(reason: str, graph: Graph, plan: Plan, context: PassContext) -> str:
    """`reason`, and how many collectives stay in the graph and why: experts are not just there while tokens travel."""
    kinds = Counter(one.kind for one in communications_of(graph))
    if not kinds:
        return reason
    number = kinds.total()
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    stay = f"{number} collective{'s' * (number > 1)} stay{'s' * (number == 1)} in the graph ({listed})"
    near = [refusal for refusal in plan.refusals if refusal.crosses_ranks]
    if near:
        others = f", and {len(near) - 1} more refusals" if len(near) > 1 else ""
        moved = "" if not plan.banks else f"{reason}; "
        return f"{moved}{stay}, because of {near[0].where}: {near[0].reason}{others}"
    if "eliminate_expert_parallelism" in context.disabled:
        return (
            f"{stay}, since pass eliminate_expert_parallelism is disabled"
            if plan.blocks and not plan.banks
            else f"{reason}; {stay}"
        )
    return f"{reason}; {stay}, none of them around experts that moepass recognises"


def lifetimes(graph: Graph) -> list[Lifetime]:
    """The gathers of a canonical graph, in the order in which they are first read."""
    place = positions(graph)
    stays = []
    for node in graph.nodes:
        if is_call(node, gather):
            found = sorted(readers(node), key=place.__getitem__)
            # copy_ gives a view of what it writes to, but what it writes it reads.
            reading = [reader for reader in found if not is_view(reader) or mutates(reader)]
            first_reader, last_reader = first_of_region((reading or found)[0]), last_of_region(found[-1])
            views = tuple(view for view in found if place[view] < place[first_reader])
            bank = node.kwargs["bank"]
            assert isinstance(bank, int)
            block = str(node.meta.get("moepass_block", node.name))
            stays.append(Lifetime(node, bank, block, views, first_reader, last_reader))
    return sorted(stays, key=lambda stay: place[stay.first_reader])


def assign_slots(stays: list[Lifetime], place: dict[Node, int], slots: int) -> list[SlotStay]:
    """Slots in the order in which they fall free. `place` gives host order, `slots` the size of the ring."""
    freed_by: list[int | None] = []
    slot_stays: list[SlotStay] = []
    for position, stay in enumerate(stays):
        needed_at = place[stay.first_reader]
        if len(freed_by) < slots:
            slot, after = len(freed_by), None
            freed_by.append(position)
        else:
            slot = min(range(slots), key=lambda index: place[stays[freed_by[index]].last_reader])  # type: ignore[index]
            after = freed_by[slot]
            assert after is not None
            if place[stays[after].last_reader] >= needed_at:
                live = _live(stays, place, needed_at)
                raise PlanError(
                    f"slots={slots} is too few: block {stay.block} needs its bank while {live} banks are being read; "
                    f"use slots={live + 1} or more"
                )
            freed_by[slot] = position
        shards = tuple(shard.name for shard in stay.gather.all_input_nodes)
        slot_stays.append(SlotStay(stay.block, stay.bank, slot, after, shards))
    return slot_stays


def _live(stays: list[Lifetime], place: dict[Node, int], moment: int) -> int:
    return sum(place[stay.first_reader] < moment <= place[stay.last_reader] for stay in stays)
