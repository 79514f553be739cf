"""Pages of a segment laid into other memory of this process, where a copy would only double them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys

import torch

_READ_WRITE = getattr(mmap, "PROT_READ", 0) | getattr(mmap, "PROT_WRITE", 0)
# Of Linux, which the mmap module has no names for.
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22


def private_memory(nbytes: int) -> torch.Tensor:
    """`nbytes` of host memory that begin with a page and that `lay_pages` may replace page by page; flat uint8."""
    if nbytes == 0 or not sys.platform.startswith("linux"):
        return torch.empty(nbytes, dtype=torch.uint8)
    # Not from an allocator, which would hand pages that were replaced to somebody else.
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _READ_WRITE), dtype=torch.uint8
    )


def lay_pages(address: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Let bytes [address, address + nbytes) of this process be those from `offset` of a segment on, by whole pages.

    What is written there later is seen by this process alone and takes memory of its own; the next call puts the
    segment's pages back. Raises OSError where the kernel does not, which leaves that memory unusable.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc().mmap(address, nbytes, _READ_WRITE, flags, descriptor, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    # All pages at once. Kernels before 5.14 do not know this, and bring them one by one as they are read.
    _libc().madvise(address, nbytes, _MADV_POPULATE_READ)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
