"""Memory that other processes of this machine can map, and that cannot be left behind.

A segment has no name in any file system: it is a descriptor of the process that made it (`memfd_create`), which others
open through /proc/PID/fd/DESCRIPTOR. The kernel frees it with the last process that has it mapped, however that ends.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import warnings
import weakref

import torch

from moepass.models.errors import MoepassError
from moepass.runtime.system.processes import ProcessIdentity, this_process

# Parts of a segment that are mapped one by one start at multiples of this.
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


def in_pages(nbytes: int) -> int:
    """`nbytes`, up to the end of their last page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class SharedMemoryError(MoepassError, RuntimeError):
    """A segment cannot be made, or not be opened where it should be."""


@dataclasses.dataclass(frozen=True)
class SegmentAddress:
    """The address of a segment: a descriptor of a process, and a check that it is the right one."""

    process: ProcessIdentity
    descriptor: int
    inode: int
    nbytes: int


class SharedSegment:
    """An open segment of `nbytes`, all zero at first. What is mapped stays mapped when this object is gone.

    Only the process that made a segment may write to it; a write to a part that was opened ends the process.
    """

    def __init__(self, descriptor: int, nbytes: int, is_owner: bool) -> None:
        """Takes over `descriptor`; use `create_segment` or `open_segment`."""
        self.nbytes = nbytes
        self.is_owner = is_owner
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def address(self) -> SegmentAddress:
        """The address by which another process opens this segment, while this object lives in this process."""
        return SegmentAddress(this_process(), self._descriptor, os.fstat(self._descriptor).st_ino, self.nbytes)

    def map_privately(self, offset: int, nbytes: int) -> mmap.mmap:
        """Bytes [offset, offset + nbytes) as they are now, to read and to write.

        Unwritten pages are those of the segment, and cost nothing; what is written here is seen here alone. Raises
        SharedMemoryError as `map`.
        """
        self._check_range(offset, nbytes)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            return mmap.mmap(self._descriptor, nbytes, mmap.MAP_PRIVATE, access, offset=offset)
        except OSError as error:
            raise SharedMemoryError(f"{nbytes} bytes of shared memory cannot be mapped: {error.strerror}") from error

    def map(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes [offset, offset + nbytes) as a flat uint8 tensor in memory of its own, which is unmapped with it.

        `offset` is a multiple of PAGE_BYTES. Raises SharedMemoryError where the range leaves the segment or cannot be
        mapped.
        """
        self._check_range(offset, nbytes)
        with torch.inference_mode(False):  # inference tensors have no version counter
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            # All pages at once: the first run must not pay for them one by one.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.is_owner else 0)
            try:
                mapped = mmap.mmap(self._descriptor, nbytes, flags, access, offset=offset)
            except OSError as error:
                raise SharedMemoryError(
                    f"{nbytes} bytes of shared memory cannot be mapped: {error.strerror}"
                ) from error
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                # The tensor holds the mapping, which ends with its last reference.
                return torch.frombuffer(mapped, dtype=torch.uint8)

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset % PAGE_BYTES or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise SharedMemoryError(
                f"bytes {offset} to {offset + nbytes} of a segment of {self.nbytes} cannot be mapped; the range must "
                f"lie in it and start at a multiple of {PAGE_BYTES}"
            )


def create_segment(nbytes: int, label: str) -> SharedSegment:
    """A segment of `nbytes`, zeroed; its pages are taken as they are mapped. `label` is for people who read /proc.

    Raises SharedMemoryError where the platform has no memory without a name.
    """
    if not hasattr(os, "memfd_create"):
        raise SharedMemoryError("this platform has no memfd_create, which shared shards need; they work on Linux only")
    import fcntl  # not there on every platform, and home `host` must work there

    try:
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SharedMemoryError(f"a segment of {nbytes} bytes cannot be made: {error.strerror}") from error
    segment = SharedSegment(descriptor, nbytes, is_owner=True)
    os.ftruncate(descriptor, nbytes)
    # Whoever maps it must never read behind a new end.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return segment


def open_segment(address: SegmentAddress) -> SharedSegment:
    """The segment that another process made, to be read. Raises SharedMemoryError where it is not there any more."""
    process = address.process
    path = f"/proc/{process.pid}/fd/{address.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise SharedMemoryError(
            f"shared memory of process {process.pid} may not be opened ({error.strerror}); "
            "all ranks must run as one user, who may trace them"
        ) from error
    except OSError as error:
        raise SharedMemoryError(f"process {process.pid} is gone, or has closed its shared memory") from error
    segment = SharedSegment(descriptor, address.nbytes, is_owner=False)
    found = os.fstat(descriptor)
    if found.st_ino != address.inode:
        raise SharedMemoryError(
            f"process {process.pid} is gone or has closed its shared memory; descriptor {address.descriptor} is "
            "something else now"
        )
    if found.st_size != address.nbytes:
        raise SharedMemoryError(
            f"the shared memory of process {process.pid} has {found.st_size} bytes, not {address.nbytes}"
        )
    return segment
