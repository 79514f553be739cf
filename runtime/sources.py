"""Where the bytes of a bank lie, and reading them without a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from moepass.passes.shards import Piece, clip_pieces


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Flat uint8 memory, and the pieces of it that a slot needs. `over_link`: they come from another device or rank.

    `memory` is empty where this process cannot read it: the rank that has it sends the pieces.
    """

    memory: torch.Tensor
    pieces: tuple[Piece, ...]
    over_link: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes that go from here into a slot."""
        return sum(piece.nbytes for piece in self.pieces)


def whole(memory: torch.Tensor) -> Source:
    """A source that is laid out like the slot, and fills all of it."""
    return Source(memory, (Piece(0, 0, memory.numel()),))


def read_range(sources: Sequence[Source], start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Bytes [start, stop) of the slot that `sources` fill, in fresh memory on `device`; synchronous."""
    memory = torch.empty(stop - start, dtype=torch.uint8, device=device)
    for source in sources:
        for piece in clip_pieces(source.pieces, start, stop):
            part = source.memory.narrow(0, piece.source_offset_bytes, piece.nbytes)
            memory.narrow(0, piece.slot_offset_bytes, piece.nbytes).copy_(part)
    return memory
