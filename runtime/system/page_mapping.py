"""Pages of a segment laid into other memory of this process, where a copy would only double them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys

import torch

from moepass.runtime.system.huge_pages import advise
from moepass.runtime.system.libc import libc

_READ_WRITE = getattr(mmap, "PROT_READ", 0) | getattr(mmap, "PROT_WRITE", 0)
# Linux constants that module mmap lacks.
_MAP_FIXED, _MAP_FIXED_NOREPLACE, _PROT_NONE = 0x10, 0x100000, 0
_MADV_POPULATE_READ = 22
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
# (void *) -1
_FAILED = ctypes.c_void_p(-1).value
# Bytes that one page table covers, on x86-64 and on ARM with pages of 4 KiB.
TABLE_BYTES = 2 << 20
# Bits of an entry in /proc/PID/pagemap: in memory, or in swap space; and whether the page belongs to a file.
_PRESENT_OR_SWAPPED, _OF_FILE = 0b110, 0b001

_has_failed_to_move = False


def private_memory(nbytes: int) -> torch.Tensor:
    """`nbytes` of host memory of which `lay_pages` and `move_pages` may replace any page; flat uint8.

    It begins where a page table does, so that bytes at one offset of two such memories move from one to the other by
    whole tables.
    """
    if nbytes == 0 or not sys.platform.startswith("linux"):
        return torch.empty(nbytes, dtype=torch.uint8)
    # Not from an allocator, which would hand pages that were replaced to somebody else. Untouched pages take no memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + TABLE_BYTES, flags, _READ_WRITE)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % TABLE_BYTES
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin)


def lay_pages(address: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Map bytes [address, address + nbytes) of this process to a segment from `offset` on, by whole pages.

    What is written there later is seen by this process alone and takes memory of its own; the next call puts the
    segment's pages back. Raises OSError where the kernel does not, which leaves that memory unusable.
    """
    _map_at(address, nbytes, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset)
    # All pages at once. Kernels before 5.14 do not know this, and bring them one by one as they are read.
    advise(address, nbytes, _MADV_POPULATE_READ)


def move_pages(address: int, nbytes: int, target: int) -> bool:
    """Move the whole pages of a segment that `lay_pages` mapped at `address` to `target`, in another private memory.

    Takes microseconds, because page tables move as they are. What is left behind are pages of the same segment, to be
    replaced. False where the kernel does not do it: before 5.13, and after it failed once. Raises OSError where it
    failed and somebody else may have the target by now.
    """
    global _has_failed_to_move
    if _has_failed_to_move or not _moves_pages():
        return False
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if libc().mremap(address, nbytes, nbytes, flags, target) == target:
        return True
    # The kernel gives up a target before it fails (as limits of memory are lowered below what is in use): it must be
    # ours again before another thread maps something there.
    _has_failed_to_move = True
    _map_at(target, nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE, -1, 0)
    return False


def _map_at(address: int, nbytes: int, protection: int, flags: int, descriptor: int, offset: int) -> None:
    if libc().mmap(address, nbytes, protection, flags, descriptor, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _moves_pages() -> bool:
    """Tried, to where the kernel likes: a target that is given may be lost to others where moving fails."""
    if not hasattr(os, "memfd_create"):
        return False
    memory = _two_pages()
    flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
    moved = libc().mremap(memory.data_ptr(), memory.numel(), memory.numel(), flags, None)
    if moved == _FAILED:
        return False
    libc().munmap(moved, memory.numel())
    return True


def has_written_pages(address: int, nbytes: int) -> bool | None:
    """True where bytes [address, address + nbytes), a private mapping of a segment, have pages that are the segment's
    no more, because somebody wrote to them; None where the system does not tell.
    """
    return _read_written_pages(address, nbytes) if _tells_written_pages() else None


def _read_written_pages(address: int, nbytes: int) -> bool | None:
    first, stop = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    entries = bytearray(8 * (stop - first))
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(8 * first)
            if not entries or pagemap.readinto(entries) != len(entries):
                return None
    except OSError:
        return None
    flags = torch.frombuffer(entries, dtype=torch.int64) >> 61
    return bool(((flags & _PRESENT_OR_SWAPPED != 0) & (flags & _OF_FILE == 0)).any())


@functools.cache
def _tells_written_pages() -> bool:
    """Tried: there are systems that have the file, and nothing in it."""
    if not hasattr(os, "memfd_create"):
        return False
    memory = _two_pages()
    address = memory.data_ptr()
    told = [_read_written_pages(address, 2 * mmap.PAGESIZE)]
    _ = int(memory.sum())
    told.append(_read_written_pages(address, 2 * mmap.PAGESIZE))
    memory[-1] = 1
    told += [_read_written_pages(address + page * mmap.PAGESIZE, mmap.PAGESIZE) for page in range(2)]
    return told == [False, False, False, True]


def _two_pages() -> torch.Tensor:
    """Two pages of a segment, mapped privately."""
    descriptor = os.memfd_create("moepass-pages", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
        return torch.frombuffer(
            mmap.mmap(descriptor, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE, _READ_WRITE), dtype=torch.uint8
        )
    finally:
        os.close(descriptor)
