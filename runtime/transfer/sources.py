"""Sources: the memory and files that hold the bytes of a bank, and reading them without a ring."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Self

import torch

from moepass.passes.ir.shards import Piece, clip_pieces


class Source:
    """Memory or a file with bytes of a bank; subclasses are dataclasses.

    `pieces` are the ranges that a slot needs. They are `over_link` if they come from another device, rank or a disk.
    """

    pieces: tuple[Piece, ...]
    over_link: bool

    @property
    def nbytes(self) -> int:
        """The number of bytes that go into a slot."""
        return sum(piece.nbytes for piece in self.pieces)

    def check_bounds(self) -> None:
        """Raise ValueError if a piece would leave its source."""
        raise NotImplementedError

    def with_pieces(self, pieces: tuple[Piece, ...]) -> Self:
        """Return the same source with other pieces."""
        return dataclasses.replace(self, pieces=pieces)  # type: ignore[type-var]

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        """Copy `nbytes` from the offset on to host memory at `address`, without the interpreter lock."""
        raise NotImplementedError

    def read(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Fill `target`, flat uint8, with the bytes from the offset on."""
        raise NotImplementedError

    def contents(self) -> Hashable:
        """Return a value that is equal at two times only if the bytes are; None if that is unknown."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class MemorySource(Source):
    """Flat uint8 memory, of any device. The object `keeps` must be alive for as long as the memory is read."""

    memory: torch.Tensor
    pieces: tuple[Piece, ...]
    over_link: bool = True
    keeps: object = dataclasses.field(default=None, kw_only=True)

    def check_bounds(self) -> None:
        """Raise ValueError if a piece would leave the memory, or the memory is not contiguous."""
        if not self.memory.is_contiguous():
            raise ValueError("a source is not contiguous")
        end = max((piece.source_offset_bytes + piece.nbytes for piece in self.pieces), default=0)
        if self.memory.numel() < end:
            raise ValueError(f"a source of {self.memory.numel()} bytes is read up to byte {end}")

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        """Copy with memmove, which uses this thread alone; Tensor.copy_ would wake a whole pool."""
        ctypes.memmove(address, self.memory.data_ptr() + offset_bytes, nbytes)

    def read(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Fill `target` from the memory; the devices may differ."""
        target.copy_(self.memory.narrow(0, offset_bytes, target.numel()))

    def contents(self) -> Hashable:
        """Return the address and torch's version counter; None for an inference tensor, which has no counter."""
        # The counter shows in-place changes. Shards of other ranks do not change once they are published.
        return None if self.memory.is_inference() else (self.memory.data_ptr(), self.memory._version)


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteSource(Source):
    """Memory of another rank, which this process cannot read: that rank sends the pieces."""

    pieces: tuple[Piece, ...]
    over_link: bool = True

    def contents(self) -> Hashable:
        """Return None, because only the other rank knows its bytes."""
        return None


def whole(memory: torch.Tensor) -> Source:
    """Return a source that is laid out like the slot and fills all of it."""
    return MemorySource(memory, (Piece(0, 0, memory.numel()),))


def read_range(sources: Sequence[Source], start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return a copy of bytes [start, stop) of the slot that `sources` fill, in new memory on `device`.

    Waits for the copy.
    """
    memory = torch.empty(stop - start, dtype=torch.uint8, device=device)
    for source in sources:
        for piece in clip_pieces(source.pieces, start, stop):
            source.read(piece.source_offset_bytes, memory.narrow(0, piece.slot_offset_bytes, piece.nbytes))
    return memory


def check_slot(sources: Sequence[Source], slot: torch.Tensor) -> None:
    """Raise ValueError if a piece of `sources` would not fit into `slot`."""
    needed = max((piece.slot_offset_bytes + piece.nbytes for source in sources for piece in source.pieces), default=0)
    if not slot.is_contiguous() or slot.numel() < needed:
        raise ValueError(f"{needed} contiguous bytes do not fit a slot of {slot.numel()}")
