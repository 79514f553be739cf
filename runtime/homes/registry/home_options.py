"""The options of each home, checked when they are made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HOMES, PULL, LinkName
from moepass.models.limits import check_wait
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S
from moepass.runtime.transfer.link import Link, parse_link
from moepass.runtime.transfer.transports import check_transport

PAGE_CACHES = ("keep", "drop")


@dataclasses.dataclass(frozen=True)
class BankRoute:
    """How banks of a model travel: from which home, between how many ranks, by which transport.

    `links` has the bytes per second of those that are emulated, by their names in a hardware profile.
    `staging_buffers` is 0 for homes that have none.
    """

    home: str
    device: torch.device
    ranks: int = 1
    transport: str = PULL
    links: Mapping[LinkName, float] = dataclasses.field(default_factory=dict)
    staging_buffers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HomeOptions:
    """The options that all homes have.

    Args:
        link: how fast bytes come into the slots: `"real"`, or `"emulate:BYTES_PER_S"` to see what a slower link would
            do (CPU only).

    Raises OptionError for a malformed link.
    """

    # Its name in `moepass.models.homes`.
    home: ClassVar[str]

    link: str = "real"

    def __post_init__(self) -> None:
        parse_link(self.link)

    def links(self) -> dict[LinkName, Link]:
        """The links that banks travel over, by their names in a hardware profile."""
        return {use.link: parse_link(self.link) for use in HOMES[self.home].travel}

    def route(self, device: torch.device) -> BankRoute:
        """How its banks travel to `device` with these options."""
        rates = {name: link.bytes_per_s for name, link in self.links().items() if link.bytes_per_s is not None}
        return BankRoute(self.home, device, links=rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(HomeOptions):
    """Complete banks in the memory of this process, pinned where a CUDA device reads them. The default home.

    Args:
        link: as of all homes.
    """

    home = "host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadOptions(HomeOptions):
    """Homes that spread every bank over the ranks of a process group.

    Args:
        group: the ranks; by default all of torch.distributed, which must be initialised.
        timeout_s: seconds that ranks wait for each other while the model is offloaded.

    Raises OptionError for a timeout that is not a positive number.
    """

    group: ProcessGroup | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wait("timeout_s", self.timeout_s)

    def route(self, device: torch.device) -> BankRoute:
        # -1 if this process is not in the group, which the home refuses.
        ranks = dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1
        return dataclasses.replace(super().route(device), ranks=max(1, ranks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer(SpreadOptions):
    """Each of N ranks keeps 1/N of every bank, and gets the rest from the other ranks.

    Args:
        transport: `"pull"`: each rank copies what it lacks when it needs it; ranks of one machine. `"collective"`: all
            ranks gather each bank together, over a network. They must then run equally many steps, and `timeout_s`
            holds for every gather.
        link, group, timeout_s: as of all homes that spread banks.

    Raises OptionError for an unknown transport, and as `SpreadOptions`.
    """

    home = "peer"

    transport: str = PULL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_transport(self.transport, HOMES[self.home])

    def route(self, device: torch.device) -> BankRoute:
        return dataclasses.replace(super().route(device), transport=self.transport)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(SpreadOptions):
    """Each of N ranks keeps 1/N of every bank in host memory, and copies it ahead to the compute device for all ranks.

    Args:
        staging_buffers: buffers of each rank, each as large as one shard. With more of them ranks may be more banks
            apart and still share what was copied.
        host_link: as `link`, for the link between host memory and the staging buffers.
        link, group, timeout_s: as of all homes that spread banks.

    Raises OptionError for fewer staging_buffers than 1, a malformed host_link, and as `SpreadOptions`.
    """

    home = "hybrid"

    staging_buffers: int = HOMES["hybrid"].staging_buffers
    host_link: str = "real"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_link(self.host_link, "host_link")
        given: object = self.staging_buffers
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise OptionError.wrong("staging_buffers", given, "a whole number from 1 on")

    def links(self) -> dict[LinkName, Link]:
        return {**super().links(), "host": parse_link(self.host_link)}

    def route(self, device: torch.device) -> BankRoute:
        return dataclasses.replace(super().route(device), staging_buffers=self.staging_buffers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk(HomeOptions):
    """Banks stay in the files of the checkpoint, and are read into the slots.

    Args:
        folder: where banks are written once that no file holds as they are: experts that are converted or transposed,
            or come from a model in memory. None: such banks are an error.
        page_cache: `"keep"`: what was read stays in the kernel's cache while there is room. `"drop"`: it goes at once,
            for machines where others need that cache more.
        link: as of all homes.

    Raises OptionError for an unknown page_cache or a folder that is no path, and as `HomeOptions`.
    """

    home = "disk"

    folder: str | os.PathLike[str] | None = None
    page_cache: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_cache not in PAGE_CACHES:
            raise OptionError.wrong("page_cache", self.page_cache, f"one of {one_of(PAGE_CACHES)}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise OptionError.wrong("folder", self.folder, "the path of a folder, or None")
