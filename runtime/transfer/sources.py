"""Positions of the bytes of a bank, and reading them without a ring."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Hashable, Sequence

import torch

from moepass.passes.ir.shards import Piece, clip_pieces


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

    def with_pieces(self, pieces: tuple[Piece, ...]) -> Source:
        """The same place, with other pieces."""
        raise NotImplementedError

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

    def with_pieces(self, pieces: tuple[Piece, ...]) -> MemorySource:
        return dataclasses.replace(self, pieces=pieces)

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
class RemoteSource(Source):
    """Memory of another rank, which this process cannot read: that rank sends the pieces."""

    pieces: tuple[Piece, ...]
    over_link: bool = True

    def with_pieces(self, pieces: tuple[Piece, ...]) -> RemoteSource:
        return dataclasses.replace(self, pieces=pieces)

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
