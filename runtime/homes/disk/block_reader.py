"""Reads of files past the kernel's page cache, ahead of the copies that need them.

    reader threads    blocks of files, in the order in which copies will need them --> buffers
    copy thread       buffers --> slot

A checkpoint that is larger than the memory gains nothing from the page cache: a page is dropped before it is needed
again. But filling the cache takes CPU time, which the computation needs. [Empirical] On a virtual machine with 2 cores,
reading 4 GB takes 3 to 4 CPU seconds through the cache, 8.5 to 9 if two threads read, and 0.3 past it.

Reads past the cache need aligned offsets and addresses, which tensors in safetensors files do not have. So whole blocks
are read into buffers, and the copy thread copies from there.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from moepass.passes.ir.shards import Piece
from moepass.runtime.system.background import run_in_background
from moepass.runtime.system.huge_pages import use_huge_pages

# [Empirical] Two reads at the same time keep the disk busy; more, or larger ones, are no faster.
READER_THREADS = 2
BLOCK_BYTES = 4 << 20
# The kernel reads past its cache at multiples of the block size of a disk, which is at most this.
ALIGNMENT_BYTES = 4096
# Bytes that are read ahead of copies that follow each other without a pause.
LEAST_AHEAD_BYTES = 64 << 20


class BlockFile(Protocol):
    """A file that can be read past the kernel's cache."""

    def read_block(self, offset_bytes: int, memory: memoryview) -> None:
        """Fill `memory`, up to the end of the file; offset, size and address are aligned. Raises CheckpointError."""


class BlockSource(Protocol):
    """Pieces of a file, in the file's order."""

    @property
    def file(self) -> BlockFile:
        """The file."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its pieces."""


BankSources = Sequence[BlockSource]


class _BlockBuffer:
    """Memory of one block, aligned."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, BLOCK_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memory = memoryview(memory)
        use_huge_pages(self.address, BLOCK_BYTES)


@dataclasses.dataclass(eq=False)
class _FileBlock:
    """The bytes [offset_bytes, offset_bytes + nbytes) of a file, at multiples of the alignment.

    Attributes:
        buffer: the memory with the bytes, or into which a thread reads them; None before and after.
        is_read: `buffer` has the bytes, or `error` says why not.
        is_dropped: no copy needs the bytes any more.
    """

    file: BlockFile
    offset_bytes: int
    nbytes: int
    buffer: _BlockBuffer | None = None
    is_read: bool = False
    is_dropped: bool = False
    error: BaseException | None = None

    def read(self) -> None:
        """Read the bytes into the buffer; an error is kept for the copy."""
        assert self.buffer is not None
        try:
            self.file.read_block(self.offset_bytes, self.buffer.memory[: self.nbytes])
        except BaseException as error:
            self.error = error


class _PlannedCopy:
    """One copy of a bank: the blocks of its sources by the source's id and number, and those that no thread has taken.

    Sources reference their reader, so they are not referenced here.
    """

    def __init__(self, sources: BankSources) -> None:
        self.blocks = {id(source): dict(_blocks(source)) for source in sources}
        # A copy reads its sources in turns.
        in_turns = itertools.zip_longest(*(blocks.values() for blocks in self.blocks.values()))
        self.waiting = collections.deque(block for blocks in in_turns for block in blocks if block is not None)


def _blocks(source: BlockSource) -> Iterator[tuple[int, _FileBlock]]:
    """Yield the number and the block of each multiple of BLOCK_BYTES that has bytes of `source`."""
    ranges: dict[int, tuple[int, int]] = {}
    for piece in source.pieces:
        start, stop = piece.source_offset_bytes, piece.source_offset_bytes + piece.nbytes
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first, end = ranges.get(number, (stop, start))
            ranges[number] = (
                min(first, max(start, number * BLOCK_BYTES)),
                max(end, min(stop, (number + 1) * BLOCK_BYTES)),
            )
    for number, (first, end) in sorted(ranges.items()):
        aligned = first // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        yield number, _FileBlock(source.file, aligned, -(-(end - aligned) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


class BlockReader:
    """Reads blocks ahead, into buffers of `ahead_bytes` together, and copies from them.

    `expected` returns all sources of the bank of a source, and those of the bank that will probably be copied next. One
    thread at a time copies.
    """

    def __init__(self, ahead_bytes: int, expected: Callable[[BlockSource], tuple[BankSources, BankSources]]) -> None:
        self._shared = _SharedReads(-(-ahead_bytes // BLOCK_BYTES))
        self._expected = expected
        # The blocks that copies read now, by source.
        self._current: dict[int, tuple[int, _FileBlock]] = {}
        self._are_threads_running = False

    def copy(self, source: BlockSource, offset_bytes: int, nbytes: int, address: int) -> None:
        """Copy bytes of `source` to `address`, from the buffers if they were read ahead. Raises CheckpointError."""
        while nbytes:
            number = offset_bytes // BLOCK_BYTES
            block = self._block(source, number)
            assert block.buffer is not None
            count = min(nbytes, (number + 1) * BLOCK_BYTES - offset_bytes)
            ctypes.memmove(address, block.buffer.address + offset_bytes - block.offset_bytes, count)
            offset_bytes, nbytes, address = offset_bytes + count, nbytes - count, address + count

    def _block(self, source: BlockSource, number: int) -> _FileBlock:
        """Return a block that has been read, and release the block of `source` before it."""
        current = self._current.get(id(source))
        if current is not None and current[0] == number:
            return current[1]
        shared = self._shared
        with shared.changed:
            self._release(id(source))
            block = shared.planned(source, number)
            if block is None:
                blocks = dict(_blocks(source))
                if number == min(blocks):  # a copy begins that was not expected
                    self._plan(source)
                block = shared.planned(source, number) or blocks[number]
            elif not shared.has_begun(source):
                self._plan(source)
            is_taken = block.buffer is not None
            while is_taken and not block.is_read:
                shared.changed.wait()
            if not is_taken:
                block.buffer = shared.buffer()
        if not is_taken:
            block.read()
        if block.error is not None:
            with shared.changed:
                shared.free(block)
            raise block.error
        self._current[id(source)] = (number, block)
        return block

    def _plan(self, source: BlockSource) -> None:
        """Read ahead the bank of `source`, whose copy begins, and the bank that probably follows."""
        for dropped in self._shared.begin(*self._expected(source)):
            self._release(dropped)
        if not self._are_threads_running:
            self._are_threads_running = True
            for number in range(READER_THREADS):
                # The threads reference only the state, so that they do not keep its owner alive.
                run_in_background(self._shared.run, self._shared.stop, f"moepass-read-{number}")
            weakref.finalize(self, self._shared.stop)

    def _release(self, source_id: int) -> None:
        if (current := self._current.pop(source_id, None)) is not None:
            self._shared.free(current[1])


class _SharedReads:
    """The planned copies and the buffers, which the reader threads share. `changed` guards all attributes."""

    def __init__(self, most_buffers: int) -> None:
        self.changed = threading.Condition()
        # The copy that has begun, and the one that probably follows.
        self._planned: list[_PlannedCopy] = []
        self._free: list[_BlockBuffer] = []
        self._buffers, self._most_buffers = 0, most_buffers
        self._is_over = False

    def begin(self, sources: BankSources, following: BankSources) -> list[int]:
        """Plan a copy of `sources`, unless it was expected, and expect one of `following`.

        Returns the ids of sources whose planned copies were dropped.
        """
        ids = {id(source) for source in sources}
        expected = [copy for copy in self._planned[1:] if copy.blocks.keys() == ids]
        dropped = [copy for copy in self._planned if copy not in expected]
        for copy in dropped:
            self._drop(copy)
        self._planned = expected or [_PlannedCopy(sources)]
        if following:
            self._planned.append(_PlannedCopy(following))
        self.changed.notify_all()
        return [source_id for copy in dropped for source_id in copy.blocks]

    def has_begun(self, source: BlockSource) -> bool:
        """Return whether the planned copy that has begun reads `source`."""
        return bool(self._planned) and id(source) in self._planned[0].blocks

    def planned(self, source: BlockSource, number: int) -> _FileBlock | None:
        """Return a block of the first planned copy of `source`; None without such a copy, or if it was dropped."""
        for copy in self._planned:
            if id(source) in copy.blocks:
                block = copy.blocks[id(source)].get(number)
                return None if block is None or block.is_dropped else block
        return None

    def buffer(self) -> _BlockBuffer:
        """Return a free buffer, or a new one."""
        if self._free:
            return self._free.pop()
        self._buffers += 1
        return _BlockBuffer()

    def free(self, block: _FileBlock) -> None:
        """Release the buffer of a block that no copy needs."""
        block.is_dropped = True
        if block.buffer is not None:
            self._free.append(block.buffer)
            block.buffer = None
            self.changed.notify_all()

    def _drop(self, copy: _PlannedCopy) -> None:
        copy.waiting.clear()
        for block in (block for blocks in copy.blocks.values() for block in blocks.values()):
            block.is_dropped = True
            if block.is_read:
                self.free(block)

    def _next(self) -> _FileBlock | None:
        """Return the next block to read, with a buffer; None if there is no block, or no buffer for it."""
        if not self._free and self._buffers >= self._most_buffers:
            return None
        for copy in self._planned:
            while copy.waiting:
                block = copy.waiting.popleft()
                # The copy thread has read it itself if it was ahead.
                if block.buffer is None and not block.is_dropped:
                    block.buffer = self.buffer()
                    return block
        return None

    def run(self) -> None:
        """Read blocks until `stop`."""
        while True:
            with self.changed:
                block = None
                while not self._is_over and (block := self._next()) is None:
                    self.changed.wait()
                if block is None:
                    return
            block.read()
            with self.changed:
                block.is_read = True
                if block.is_dropped:
                    self.free(block)
                self.changed.notify_all()
            del block

    def stop(self) -> None:
        """End the reader threads."""
        with self.changed:
            self._is_over = True
            self.changed.notify_all()
