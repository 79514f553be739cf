"""Experts of a model that runs with expert parallelism already: what each rank holds becomes a shard for all ranks.

A graph from which expert parallelism was taken reads complete banks, of which its own parameters are this rank's part.
In its first run these parts go into shared memory and the ranks meet, once; from then on each pulls what it lacks
whenever it wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from moepass.models.errors import InputError
from moepass.passes.ir import BankSpec, Plan
from moepass.passes.protocol import Group
from moepass.runtime.adopted_banks import AdoptionOptions, adopted_banks
from moepass.runtime.executor import Adopt
from moepass.runtime.ring import Ring


def process_groups(names: Iterable[str]) -> dict[str, Group]:
    """This rank's place in each of the process groups with these names; those that do not exist here are left out."""
    known = {str(group.group_name): group for group in c10d._world.pg_map}
    return {name: Group(known[name].rank(), known[name].size()) for name in names if name in known}


def adoption(plan: Plan, device: torch.device, options: AdoptionOptions, debug: bool) -> Adopt | None:
    """What completes the banks of `plan` where they come for the first time; None where none are the graph's inputs.

    Raises InputError for a device that adopted banks cannot stream to.
    """
    groups = {bank.group for bank in plan.banks if bank.group}
    if not plan.residencies or not groups:
        return None
    (name,) = groups
    if device.type != "cpu":
        raise InputError(
            f"the graph computes on {device}, but expert parallelism leaves graphs on cpu only so far; leave it there "
            "with options={'disable': ['localise', 'complete_shards']}"
        )

    def adopt(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> tuple[Ring, list[BankSpec]]:
        group = _group(name)
        return adopted_banks(group, device).adopt(group, banks, parts, options, debug)

    return adopt


def _group(name: str) -> ProcessGroup:
    """Raises InputError where there is none of that name any more."""
    for group in c10d._world.pg_map:
        if group.group_name == name:
            return group
    raise InputError(f"process group {name!r}, over which the experts are spread, was destroyed; compile again")


__all__ = ["AdoptionOptions", "adopted_banks", "adoption", "process_groups"]
