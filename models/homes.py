"""The homes where experts can rest: one record for each, for the planner, reports and the command line.

A new home needs a record here and one in `runtime/homes/options`, which defines how its banks are packed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from moepass.models.errors import InputError

# Transports of shards between ranks: one-sided copies by each rank, or a collective of all ranks.
PULL, COLLECTIVE = "pull", "collective"

# Part of a bank that is spread over N ranks: all of it, the 1/N of this rank, or the shards of all other ranks.
BankPart = Literal["all", "own", "others"]
# Links of a hardware profile: between devices, between host memory and device, from a disk.
LinkName = Literal["peer", "host", "disk"]
LINKS: tuple[LinkName, ...] = get_args(LinkName)
# Owner of the memory that banks rest in.
RestingPlace = Literal["device", "host", "files"]


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """A transfer of `part` of every bank over `link`."""

    link: LinkName
    part: BankPart


@dataclasses.dataclass(frozen=True)
class HomeRecord:
    """Properties of a home.

    Attributes:
        banks_there: what banks do there, as the end of a sentence
        rests_in: owner of the memory that the banks take
        travel: links over which a bank is transferred to the device, all at the same time; empty: it rests there
        devices: kinds of devices that can compute from this home
        is_spread: each of N ranks holds 1/N of every bank
        transports: transports that can exchange shards between ranks, the default first
        staging_buffers: default number of buffers on the compute device in front of the slots, each for one shard
        is_candidate: `explain` considers it by default
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
        """True if each rank holds its shard, or the complete bank, on the compute device."""
        return self.rests_in == "device"

    @property
    def is_in_files(self) -> bool:
        """True if banks rest in files."""
        return self.rests_in == "files"


# In the order in which `explain` tries them: the simplest first.
HOMES: dict[str, HomeRecord] = {
    record.name: record
    for record in (
        HomeRecord("device", "rest on the compute device", "device", travel=(), devices=("cpu", "cuda")),
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
            # On device meta a model is planned but not run.
            devices=("cpu", "cuda", "meta"),
            is_candidate=True,
        ),
        HomeRecord("disk", "rest in files", "files", (LinkUse("disk", "all"),), devices=("cpu", "cuda")),
    )
}


# The home of experts in a model that already has expert parallelism: the parameters of each rank are its shard.
ADOPTED = HOMES["peer"]


def home_named(name: str) -> HomeRecord:
    """Return the home called `name`. Raises InputError for an unknown name."""
    if name not in HOMES:
        raise InputError.unknown("home", name, HOMES)
    return HOMES[name]
