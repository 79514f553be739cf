"""The homes, where experts may rest: one record for each, which planner, reports and the command line read.

A new home is one record here and one in `runtime/homes/registry`, which says how its banks are packed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from moepass.models.errors import InputError, one_of

# Transports of shards between ranks: one-sided copies of each rank, or a gather in which all ranks take part.
PULL, COLLECTIVE = "pull", "collective"

# Part of a bank that is spread over N ranks: all of it, the 1/N of this rank, or the rest.
BankPart = Literal["all", "own", "others"]
# Links of a hardware profile: between devices, between host memory and device, from a disk.
LinkName = Literal["peer", "host", "disk"]
LINKS: tuple[LinkName, ...] = get_args(LinkName)
# Owner of the memory that banks rest in.
RestingPlace = Literal["device", "host", "files"]


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """`part` of every bank comes over `link`."""

    link: LinkName
    part: BankPart


@dataclasses.dataclass(frozen=True)
class HomeRecord:
    """Properties of a home that hold wherever it is used.

    name              as in `offload_experts(home=...)`
    banks_there       what banks do there, as the rest of a sentence
    rests_in          whose memory the banks take
    travel            the links over which a bank comes into a slot, all at the same time; none: it stays on the device
    devices           kinds of devices that can compute from it so far
    is_spread         each of N ranks keeps 1/N of every bank
    transports        what can move shards between ranks, the default first
    staging_buffers   buffers on the compute device before the slots, each as large as one shard, by default
    is_candidate      `explain` tries it without being asked
    """

    name: str
    banks_there: str
    rests_in: RestingPlace
    travel: tuple[LinkUse, ...]
    devices: tuple[str, ...] = ("cpu",)
    is_spread: bool = False
    transports: tuple[str, ...] = ()
    staging_buffers: int = 0
    is_candidate: bool = False

    @property
    def keeps_shards_on_device(self) -> bool:
        return self.is_spread and self.rests_in == "device"

    @property
    def is_in_files(self) -> bool:
        return self.rests_in == "files"


# In the order in which `explain` tries them: the simplest first.
HOMES: dict[str, HomeRecord] = {
    record.name: record
    for record in (
        HomeRecord("device", "stay on the compute device", "device", travel=(), devices=("cpu", "cuda")),
        HomeRecord(
            "peer",
            "lie in shards on all ranks",
            "device",
            (LinkUse("peer", "others"),),
            devices=("cpu", "cuda"),
            is_spread=True,
            transports=(PULL, COLLECTIVE),
            is_candidate=True,
        ),
        HomeRecord(
            "hybrid",
            "lie in shards in host memory, staged on all ranks",
            "host",
            (LinkUse("peer", "others"), LinkUse("host", "own")),
            devices=("cpu", "cuda"),
            is_spread=True,
            transports=(PULL,),
            staging_buffers=2,
            is_candidate=True,
        ),
        HomeRecord(
            "host",
            "rest in host memory",
            "host",
            (LinkUse("host", "all"),),
            # On device meta a model is planned and not run.
            devices=("cpu", "cuda", "meta"),
            is_candidate=True,
        ),
        HomeRecord("disk", "rest in files", "files", (LinkUse("disk", "all"),), devices=("cpu", "cuda")),
    )
}


# The home of experts that a model with expert parallelism has already: the parameters of each rank are its shard.
ADOPTED = HOMES["peer"]


def home_named(name: str) -> HomeRecord:
    """Raises InputError for a name that no home has."""
    if name not in HOMES:
        raise InputError(
            f"home is {name!r}; it must be one of {one_of(HOMES)}", name="home", value=name, expected=tuple(HOMES)
        )
    return HOMES[name]
