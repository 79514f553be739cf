"""The options of each home, checked by their constructors."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HOMES, PULL, LinkName
from moepass.models.limits import check_wait
from moepass.runtime.homes.disk.disk_home import AUTO, PAGE_CACHES
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S
from moepass.runtime.transfer.home_protocol import check_transport
from moepass.runtime.transfer.link import Link, parse_link


@dataclasses.dataclass(frozen=True, kw_only=True)
class HomeOptions:
    """The options that all homes have.

    The constructors of all homes raise OptionError for a malformed link, a timeout that is not positive, or a value of
    another option that its description excludes.
    """

    # The home's name in `moepass.models.homes`.
    home: ClassVar[str]
    # The options of some homes, with the values that the others have.
    transport = PULL
    staging_buffers = 0

    link: str = "real"

    def __post_init__(self) -> None:
        parse_link(self.link)

    def links(self) -> dict[LinkName, Link]:
        """Return the links that banks travel over, by their names in a hardware profile."""
        return {use.link: parse_link(self.link) for use in HOMES[self.home].travel}

    @property
    def ranks(self) -> int:
        """The number of ranks that have shards."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host(HomeOptions):
    """Complete banks in the memory of this process, pinned if a CUDA device reads them. The default home.

    Args:
        link: the link that banks are copied over: `"real"`, or, on a CPU, `"emulate:BYTES_PER_S"` to emulate a slower
            one.
    """

    home = "host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device(HomeOptions):
    """Complete banks on the compute device, quantised as the checkpoint stores them or packed, decoded into the slots.

    Layers whose experts are neither quantised nor packed are resident.

    Args:
        link: `"real"`: nothing travels over a link, so there is no other value.
    """

    home = "device"

    def __post_init__(self) -> None:
        if self.link != "real":
            text = f"link is {self.link!r}, but with home='device' no experts travel over a link"
            raise OptionError(text, name="link", value=self.link, expected="real")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpreadOptions(HomeOptions):
    """Options of homes that spread every bank over the ranks of a process group."""

    group: ProcessGroup | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wait("timeout_s", self.timeout_s)

    @property
    def ranks(self) -> int:
        """The number of ranks that have shards."""
        # The size is -1 if this process is not in the group; the home refuses that later.
        ranks = dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1
        return max(1, ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer(SpreadOptions):
    """Each of N ranks stores 1/N of every bank, and copies the remaining experts from the other ranks.

    Args:
        transport: `"pull"`: each rank copies when it needs to; all ranks are on one machine. `"collective"`: all ranks
            gather each bank together, over a network; they run equally many steps, and `timeout_s` applies to a gather.
        link: the speed of copies into the slots, see `Host`.
        group: the ranks; by default all of torch.distributed, which must be initialised.
        timeout_s: seconds that ranks wait for each other in `offload_experts`.
    """

    home = "peer"

    transport: str = PULL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_transport(self.transport, HOMES[self.home])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid(SpreadOptions):
    """Each of N ranks stores a shard of every bank in host memory, and copies it ahead to its device for all ranks.

    Args:
        staging_buffers: buffers of each rank, each as large as one shard. With more buffers, ranks can still share
            copies when one is several banks ahead of another.
        host_link: the speed of copies from host memory into the staging buffers, in the form of `link`.
        link: the speed of copies into the slots, see `Host`.
        group: the ranks; by default all of torch.distributed, which must be initialised.
        timeout_s: seconds that ranks wait for each other in `offload_experts`.
    """

    home = "hybrid"

    staging_buffers: int = HOMES["hybrid"].staging_buffers
    host_link: str = "real"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_link(self.host_link, "host_link")
        count: object = self.staging_buffers
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise OptionError.wrong("staging_buffers", count, "a whole number of at least 1")

    def links(self) -> dict[LinkName, Link]:
        """Return the links that banks travel over, with the link from host memory."""
        return {**super().links(), "host": parse_link(self.host_link)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk(HomeOptions):
    """Banks stay in the files of the checkpoint, and are read into the slots.

    Args:
        folder: where moepass writes, once, the banks that no file contains byte for byte: experts that are converted or
            transposed, or that come from a model in memory. With None, such banks raise an error.
        page_cache: `"keep"`: files are read through the kernel's page cache, which keeps pages while there is memory.
            `"drop"`: files are read past the cache, which costs less CPU time; if their file system does not support
            that, pages are dropped after each read. `"auto"`: `"drop"` if the banks are larger than the memory that is
            available when they are loaded, else `"keep"`.
        link: the speed of copies into the slots, see `Host`.
    """

    home = "disk"

    folder: str | os.PathLike[str] | None = None
    page_cache: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_cache not in PAGE_CACHES:
            raise OptionError.wrong("page_cache", self.page_cache, f"one of {one_of(PAGE_CACHES)}")
        if self.folder is not None and not isinstance(self.folder, (str, os.PathLike)):
            raise OptionError.wrong("folder", self.folder, "the path of a folder, or None")
