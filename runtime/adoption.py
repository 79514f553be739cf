"""Experts of a model that runs with expert parallelism already: what each rank holds becomes a shard for all ranks.

A graph from which expert parallelism was taken reads complete banks, of which its own parameters are this rank's part.
In its first run the ranks meet, once, and these parts go to where the transport reads them; from then on each rank
pulls what it lacks whenever it wants, or all gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.fx import GraphModule

from moepass.models.errors import InputError
from moepass.passes.ir import BankSpec, Plan
from moepass.passes.protocol import Group
from moepass.runtime.adopted_banks import AdoptionOptions, adopted_banks, adopted_parts
from moepass.runtime.decisions import Left
from moepass.runtime.device_home import check_transport_to
from moepass.runtime.dispatching import Dispatcher
from moepass.runtime.executor import Adopt
from moepass.runtime.link import check_link_to
from moepass.runtime.ring import Ring


def process_groups(names: Iterable[str]) -> dict[str, Group]:
    """This rank's place in each of the process groups with these names; those that do not exist here are left out."""
    known = {str(group.group_name): group for group in c10d._world.pg_map}
    return {name: Group(known[name].rank(), known[name].size()) for name in names if name in known}


def dispatching(
    plan: Plan, captured: GraphModule, lower: str, device: torch.device, options: AdoptionOptions
) -> Dispatcher | None:
    """What chooses the form of each run; None where the plan has no dispatch.

    `captured` is the graph that the plan was made for, `lower` how it is compiled where it has to run.
    """
    dispatch = plan.dispatch
    if dispatch is None:
        return None
    (name,) = {bank.group for bank in plan.banks}
    left = [Left(refusal.where, refusal.reason) for refusal in plan.refusals if refusal.group == name]
    border = "estimated from a profile" if dispatch.is_estimated else str(dispatch.border_tokens)

    def compare(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = _group(name)
        adopted_banks(group, device).compare(group, banks, parts, left, options.timeout_s, border)

    return Dispatcher(dispatch, captured, lower, lambda: _group(name), compare, options.timeout_s)


def adoption(plan: Plan, device: torch.device, options: AdoptionOptions, debug: bool) -> Adopt | None:
    """What is done where the banks of `plan`, or blocks that it leaves as they came, come for the first time.

    None where the graph has no parameters that become banks, and leaves nothing that all ranks must leave. Raises
    InputError for a device that banks of other ranks cannot stream to, OptionError for a link that is none there.
    """
    of_banks = {bank.group for bank in plan.banks if bank.group}
    left: dict[str, list[Left]] = defaultdict(list)
    for refusal in plan.refusals:
        if refusal.group:
            left[refusal.group].append(Left(refusal.where, refusal.reason))
    if plan.residencies and not of_banks:  # banks of a model that was offloaded
        return None
    names = sorted(of_banks | set(left))
    if not names:
        return None
    if of_banks:
        check_transport_to(device, options.transport)
        check_link_to(device, options.link)

    def adopt(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> tuple[Ring | None, list[BankSpec]]:
        ring, known = None, list(banks)
        for name in names:
            group = _group(name)
            adopted = adopted_banks(group, device)
            if name in of_banks:
                ring, known = adopted.adopt(group, banks, parts, left[name], options, debug)
            else:
                adopted.adopt(group, (), (), left[name], options)
        return ring, known

    return adopt


def _group(name: str) -> ProcessGroup:
    """Raises InputError where there is none of that name any more."""
    for group in c10d._world.pg_map:
        if group.group_name == name:
            return group
    raise InputError(f"process group {name!r}, over which the experts are spread, was destroyed; compile again")


__all__ = ["AdoptionOptions", "adopted_banks", "adopted_parts", "adoption", "dispatching", "process_groups"]
