"""The options of each home, checked when they are made."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

from torch.distributed import ProcessGroup

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HOMES, PULL, LinkName
from moepass.models.limits import check_wait
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S
from moepass.runtime.transfer.link import Link, parse_link
from moepass.runtime.transfer.transports import check_transport

PAGE_CACHES = ("keep", "drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HomeOptions:
    """What all homes have in common.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer(SpreadOptions):
    """Each of N ranks keeps 1/N of every bank, and gets the rest from the other ranks.

    Args:
        transport: `"pull"`: each rank copies what it lacks when it needs it; ranks of one machine. `"collective"`: all
            ranks gather each bank together, over a network, on CPUs. They must then run equally many steps, and
            `timeout_s` holds for every gather.
        link, group, timeout_s: as of all homes that spread banks.

    Raises OptionError for an unknown transport, and as `SpreadOptions`.
    """

    home = "peer"

    transport: str = PULL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_transport(self.transport)


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
            raise OptionError(f"page_cache is {self.page_cache!r}; it must be one of {one_of(PAGE_CACHES)}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise OptionError(f"folder is {self.folder!r}; it must be the path of a folder, or None")
