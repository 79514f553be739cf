"""Checkpoint files that are read straight into slots, or past the kernel's cache by a `BlockReader`.

Through the cache, a bank is read with `preadv`, not copied from a mapping of the file. Measured with warm pages, 512 MB
in slices of 4 MB, reading reaches 13.5 to 14.3 GB/s; copying reaches 12.2 to 12.9 from a fresh mapping and 12.6 to 15
from a mapping that was touched before. If a mapped file is truncated, the process gets a signal; a read returns an
error. And reading does not fill and empty page tables with every bank.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import os
import weakref
from collections.abc import Hashable
from pathlib import Path

import torch

from moepass.models.checkpoint.checkpoint_files import DTYPES, StoredTensor
from moepass.models.checkpoint.file_header import read_header
from moepass.models.checkpoint.file_stamp import FileStamp
from moepass.models.errors import CheckpointError
from moepass.passes.ir.shards import Piece
from moepass.runtime.homes.disk.block_reader import ALIGNMENT_BYTES, BlockReader
from moepass.runtime.transfer.sources import Source

# The kernel reads at most its read-ahead window of an announced range and ignores the rest. This is the usual size of
# the window. [Empirical] With a window of 8 MB, steps of this size cost nothing more.
_ANNOUNCED_AT_ONCE_BYTES = 128 << 10
# One byte in this many is looked up in the cache: announcing cached bytes takes a third of the time of copying them.
# [Empirical] 12 ms for 512 MB.
_ASKED_AT_ONCE_BYTES = 4 << 20


class DiskFile:
    """A safetensors file, open for as long as this object lives.

    Raises CheckpointError if the file cannot be opened or is not a complete safetensors file. Reads raise it if the
    file was changed in place. Deleting or replacing the file is harmless, and so is a new name, owner or mode.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}", path=path) from error
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._stamp = FileStamp.of(self.descriptor)
        self.header = read_header(self.descriptor, path)

    def offset_bytes(self, tensor: StoredTensor) -> int:
        """Return the offset of `tensor`. Raises CheckpointError unless this is the file whose header described it."""
        entry = self.header.tensors.get(tensor.key)
        is_same = tensor.stamp == self._stamp
        if not is_same or entry is None or (DTYPES.get(entry.dtype), entry.shape) != (tensor.dtype, tensor.shape):
            raise CheckpointError(
                f"{self.path} was changed or replaced while the model was loaded from it; load it again", path=self.path
            )
        return entry.offset_bytes

    def check(self) -> None:
        """Raise CheckpointError if the file was changed. Makes one system call."""
        # The stamp of the open file, because another file may have its name by now.
        now = FileStamp.of(self.descriptor)
        if now != self._stamp:
            raise CheckpointError(
                f"{self.path} was changed while a model streams from it: it had {self._stamp.describe()}, now it has "
                f"{now.describe()}; load the model again, and replace files by renaming new ones",
                path=self.path,
            )

    def read(self, offset_bytes: int, nbytes: int, address: int) -> None:
        """Read `nbytes` into memory at `address`. Raises CheckpointError if the file is too short or was changed."""
        done = 0
        while done < nbytes:
            buffer = (ctypes.c_char * (nbytes - done)).from_address(address + done)
            try:
                count = os.preadv(self.descriptor, [buffer], offset_bytes + done)
            except OSError as error:
                raise CheckpointError(
                    f"bytes {offset_bytes} to {offset_bytes + nbytes} of {self.path} cannot be read: {error.strerror}",
                    path=self.path,
                ) from error
            if count == 0:
                break
            done += count
        # Checked after the read: a write before the read has changed the file's time.
        self.check()
        if done < nbytes:
            raise self._too_short(offset_bytes + done, offset_bytes + nbytes)

    @functools.cached_property
    def past_the_cache(self) -> int | None:
        """A descriptor that reads past the kernel's cache; None if the file system does not support it."""
        try:
            # Opened through the open file, because another file may have its name by now.
            descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            return None
        close = weakref.finalize(self, os.close, descriptor)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT_BYTES)], 0)
        except OSError:
            close()
            return None
        return descriptor

    def read_block(self, offset_bytes: int, memory: memoryview) -> None:
        """Fill `memory`, up to the end of the file, past the kernel's cache, which `past_the_cache` must support.

        Offset, address and size are multiples of ALIGNMENT_BYTES. Raises the errors of `read`.
        """
        assert self.past_the_cache is not None
        done, needed = 0, min(len(memory), self.header.nbytes - offset_bytes)
        while done < needed:
            try:
                count = os.preadv(self.past_the_cache, [memory[done:]], offset_bytes + done)
            except OSError as error:
                raise CheckpointError(
                    f"bytes {offset_bytes} to {offset_bytes + needed} of {self.path} cannot be read: {error.strerror}",
                    path=self.path,
                ) from error
            done += count
            # The next read would not be aligned, so this one ended at the end of the file.
            if count == 0 or count % ALIGNMENT_BYTES:
                break
        self.check()
        if done < needed:
            raise self._too_short(offset_bytes + done, offset_bytes + needed)

    def _too_short(self, end: int, needed: int) -> CheckpointError:
        text = f"{self.path} ends at byte {end}, before byte {needed}"
        return CheckpointError(text, path=self.path, value=end, expected=needed)

    def announce(self, offset_bytes: int, nbytes: int) -> None:
        """Ask the kernel to read these bytes into its page cache, unless they seem to be cached."""
        stop = offset_bytes + nbytes
        for start in range(offset_bytes, stop, _ASKED_AT_ONCE_BYTES):
            if self._is_cached(start):
                continue
            for step in range(start, min(start + _ASKED_AT_ONCE_BYTES, stop), _ANNOUNCED_AT_ONCE_BYTES):
                count = min(_ANNOUNCED_AT_ONCE_BYTES, stop - step)
                os.posix_fadvise(self.descriptor, step, count, os.POSIX_FADV_WILLNEED)

    def _is_cached(self, offset_bytes: int) -> bool:
        """Return whether this byte is in the kernel's cache; False if the file system cannot say."""
        try:
            return os.preadv(self.descriptor, [bytearray(1)], offset_bytes, os.RWF_NOWAIT) == 1
        except OSError:  # not cached, or a file system without this call
            return False

    def forget(self, offset_bytes: int, nbytes: int) -> None:
        """Let the kernel drop these bytes from its cache."""
        os.posix_fadvise(self.descriptor, offset_bytes, nbytes, os.POSIX_FADV_DONTNEED)


@dataclasses.dataclass(frozen=True, eq=False)
class FileSource(Source):
    """Pieces of a file, in the file's order.

    Attributes:
        keeps_pages: whether pages stay in the kernel's cache after a read through it.
        reader: the reader for copies past the kernel's cache; None if copies read through it.
    """

    file: DiskFile
    pieces: tuple[Piece, ...]
    keeps_pages: bool = True
    over_link: bool = True
    reader: BlockReader | None = dataclasses.field(default=None, kw_only=True)

    def check_bounds(self) -> None:
        """Raise ValueError if a piece ends after the end of the file."""
        end = max((piece.source_offset_bytes + piece.nbytes for piece in self.pieces), default=0)
        if self.file.header.nbytes < end:
            raise ValueError(f"{self.file.path} of {self.file.header.nbytes} bytes is read up to byte {end}")

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        """Read bytes of the file into host memory at `address`."""
        if self.reader is not None:
            self.reader.copy(self, offset_bytes, nbytes, address)
        else:
            self._read_through_cache(offset_bytes, nbytes, address)

    def _read_through_cache(self, offset_bytes: int, nbytes: int, address: int) -> None:
        self.file.read(offset_bytes, nbytes, address)
        if not self.keeps_pages:
            self.file.forget(offset_bytes, nbytes)

    def read(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Read bytes of the file into `target`, on any device, in any thread."""
        memory = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        self._read_through_cache(offset_bytes, target.numel(), memory.data_ptr())
        if memory is not target:
            target.copy_(memory)

    def contents(self) -> Hashable:
        """Return this object, which always has the same contents: if the file changes, every read raises."""
        return self

    def announce(self) -> None:
        """Ask the kernel to read all pieces into its page cache."""
        start = stop = 0
        for piece in self.pieces:
            if piece.source_offset_bytes != stop:
                self.file.announce(start, stop - start)
                start = piece.source_offset_bytes
            stop = piece.source_offset_bytes + piece.nbytes
        self.file.announce(start, stop - start)
