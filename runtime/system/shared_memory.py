"""Memory that other processes of this machine can map, and that is freed with the last process that uses it.

A segment has no name in any file system: it is a descriptor of the process that made it (`memfd_create`), which other
processes open through /proc/PID/fd/DESCRIPTOR. The kernel frees it when no process has it open or mapped, even if
processes crash.
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

# Ranges of a segment can be mapped from multiples of this on.
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


def in_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to complete pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class SharedMemoryError(MoepassError, RuntimeError):
    """A segment cannot be made, opened or mapped."""


@dataclasses.dataclass(frozen=True)
class SegmentAddress:
    """The address of a segment: a descriptor of a process, with its inode to check that it is the right one."""

    process: ProcessIdentity
    descriptor: int
    inode: int
    nbytes: int


class SharedSegment:
    """An open segment of `nbytes`, all zero at first. Mapped memory stays mapped when this object is deleted.

    Only the process that made a segment may write to it; a write to an opened segment ends the process.
    Use `create_segment` or `open_segment` to make one: the object owns its `descriptor`.
    """

    def __init__(self, descriptor: int, nbytes: int, is_owner: bool) -> None:
        self.nbytes = nbytes
        self.is_owner = is_owner
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    def address(self) -> SegmentAddress:
        """Return the address by which another process opens this segment. Valid while this object exists."""
        return SegmentAddress(this_process(), self._descriptor, os.fstat(self._descriptor).st_ino, self.nbytes)

    def map_privately(self, offset: int, nbytes: int) -> mmap.mmap:
        """Return a private, writable mapping of bytes [offset, offset + nbytes).

        Pages that are not written are shared with the segment and take no memory; writes are visible only here. Raises
        SharedMemoryError like `map`.
        """
        self._check_range(offset, nbytes)
        return self._mapped(offset, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def map(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes [offset, offset + nbytes) as a flat uint8 tensor, which unmaps them when it is deleted.

        `offset` is a multiple of PAGE_BYTES. Raises SharedMemoryError if the range leaves the segment or cannot be
        mapped.
        """
        self._check_range(offset, nbytes)
        with torch.inference_mode(False):  # inference tensors have no version counter
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            # Map all pages now, so that the first run has no page faults.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.is_owner else 0)
            mapped = self._mapped(offset, nbytes, flags, access)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                # The tensor holds the only reference to the mapping.
                return torch.frombuffer(mapped, dtype=torch.uint8)

    def _mapped(self, offset: int, nbytes: int, flags: int, access: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor, nbytes, flags, access, offset=offset)
        except OSError as error:
            raise SharedMemoryError(f"{nbytes} bytes of shared memory cannot be mapped: {error.strerror}") from error

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset % PAGE_BYTES or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise SharedMemoryError(
                f"bytes {offset} to {offset + nbytes} of a segment of {self.nbytes} cannot be mapped; the range must "
                f"lie in it and start at a multiple of {PAGE_BYTES}"
            )


def create_segment(nbytes: int, label: str) -> SharedSegment:
    """Return a zeroed segment of `nbytes`; pages are allocated when they are mapped. `label` is shown in /proc.

    Raises SharedMemoryError if the platform has no anonymous shared memory.
    """
    if not hasattr(os, "memfd_create"):
        raise SharedMemoryError("this platform has no memfd_create, which shared shards need; run on Linux")
    import fcntl  # missing on platforms where home `host` must work

    try:
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise SharedMemoryError(f"a segment of {nbytes} bytes cannot be made: {error.strerror}") from error
    segment = SharedSegment(descriptor, nbytes, is_owner=True)
    os.ftruncate(descriptor, nbytes)
    # A process that maps the segment must never read beyond a new end.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return segment


def open_segment(address: SegmentAddress) -> SharedSegment:
    """Return the segment of another process, for reading. Raises SharedMemoryError if it no longer exists."""
    process = address.process
    path = f"/proc/{process.pid}/fd/{address.descriptor}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise SharedMemoryError(
            f"shared memory of process {process.pid} may not be opened ({error.strerror}); "
            "all ranks must run as the same user, with permission for ptrace"
        ) from error
    except OSError as error:
        raise SharedMemoryError(f"process {process.pid} is gone, or has closed its shared memory") from error
    segment = SharedSegment(descriptor, address.nbytes, is_owner=False)
    status = os.fstat(descriptor)
    if status.st_ino != address.inode:
        raise SharedMemoryError(
            f"process {process.pid} is gone or has closed its shared memory; descriptor {address.descriptor} is "
            "another file now"
        )
    if status.st_size != address.nbytes:
        raise SharedMemoryError(
            f"the shared memory of process {process.pid} has {status.st_size} bytes, not {address.nbytes}"
        )
    return segment
