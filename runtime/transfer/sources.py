"""Positions of the bytes of a bank, and reading them without a ring."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Hashable, Sequence

import torch

from moepass.passes.ir.shards import Piece, clip_pieces
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment
from moepass.runtime.system.slot_pages import KeptPages, lay_in_slot

# [Empirical] Below this a copy takes less time than changing the page tables.
_LEAST_LAID_BYTES = 64 << 10


class Source:
    """A place with bytes of a bank, and the pieces of it that a slot needs.

    `over_link`: they come from another device or rank, or from a disk.
    """

    pieces: tuple[Piece, ...]
    over_link: bool

    @property
    def nbytes(self) -> int:
        """Bytes that go from here into a slot."""
        return sum(piece.nbytes for piece in self.pieces)

    def check_bounds(self) -> None:
        """Raises ValueError where a piece would leave its source."""
        raise NotImplementedError

    def lay(self, slot: torch.Tensor) -> tuple[Piece, ...]:
        """Bring into `slot` what need not be copied; gives the pieces that are left to copy."""
        return self.pieces

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        """Copy `nbytes` from there to host memory at `address`, without the interpreter lock."""
        raise NotImplementedError

    def read(self, offset_bytes: int, place: torch.Tensor) -> None:
        """Fill `place`, flat uint8, from there on."""
        raise NotImplementedError

    def contents(self) -> Hashable:
        """Equal at two times only if the bytes are; None where that cannot be told."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class MemorySource(Source):
    """Flat uint8 memory, of any device. `keeps` is what must be there for as long as it is read."""

    memory: torch.Tensor
    pieces: tuple[Piece, ...]
    over_link: bool = True
    keeps: object = dataclasses.field(default=None, kw_only=True)

    def check_bounds(self) -> None:
        if not self.memory.is_contiguous():
            raise ValueError("a source is not contiguous")
        end = max((piece.source_offset_bytes + piece.nbytes for piece in self.pieces), default=0)
        if self.memory.numel() < end:
            raise ValueError(f"a source of {self.memory.numel()} bytes is read up to byte {end}")

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        # memmove uses this thread alone, where Tensor.copy_ would wake a whole pool.
        ctypes.memmove(address, self.memory.data_ptr() + offset_bytes, nbytes)

    def read(self, offset_bytes: int, place: torch.Tensor) -> None:
        place.copy_(self.memory.narrow(0, offset_bytes, place.numel()))

    def contents(self) -> Hashable:
        # In-place changes are told by torch's version counter, which inference tensors do not have. Other ranks' shards
        # do not change once they are published.
        return None if self.memory.is_inference() else (self.memory.data_ptr(), self.memory._version)


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentSource(MemorySource):
    """As `MemorySource`, for what this process has in a segment from `segment_offset_bytes` on.

    Its whole pages are mapped into the slot, where they fall on pages: they take neither time nor memory twice.
    """

    segment: SharedSegment = dataclasses.field(kw_only=True)
    segment_offset_bytes: int = dataclasses.field(kw_only=True)

    # Of `pieces`, all slots beginning with a page: what is mapped, and what is left to copy.
    _mapped: tuple[KeptPages, ...] = dataclasses.field(init=False)
    _copied: tuple[Piece, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        mapped: list[KeptPages] = []
        copied: list[Piece] = []
        for piece in self.pieces:
            start, stop = piece.slot_offset_bytes, piece.slot_offset_bytes + piece.nbytes
            begin, end = -start % PAGE_BYTES, piece.nbytes - stop % PAGE_BYTES
            place = self.segment_offset_bytes + piece.source_offset_bytes + begin
            if end - begin < _LEAST_LAID_BYTES or place % PAGE_BYTES:
                copied.append(piece)
                continue
            mapped.append(KeptPages(self.segment, place, end - begin, start + begin))
            copied += [edge for edge in (piece.part(0, begin), piece.part(end, piece.nbytes)) if edge.nbytes]
        object.__setattr__(self, "_mapped", tuple(mapped))
        object.__setattr__(self, "_copied", tuple(copied))

    def lay(self, slot: torch.Tensor) -> tuple[Piece, ...]:
        for pages in self._mapped:
            lay_in_slot(pages, slot)
        return self._copied


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteSource(Source):
    """Memory of another rank, which this process cannot read: that rank sends the pieces."""

    pieces: tuple[Piece, ...]
    over_link: bool = True

    def contents(self) -> Hashable:
        return None


def whole(memory: torch.Tensor) -> Source:
    """A source that is laid out like the slot, and fills all of it."""
    return MemorySource(memory, (Piece(0, 0, memory.numel()),))


def read_range(sources: Sequence[Source], start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Bytes [start, stop) of the slot that `sources` fill, in fresh memory on `device`; synchronous."""
    memory = torch.empty(stop - start, dtype=torch.uint8, device=device)
    for source in sources:
        for piece in clip_pieces(source.pieces, start, stop):
            source.read(piece.source_offset_bytes, memory.narrow(0, piece.slot_offset_bytes, piece.nbytes))
    return memory
