"""Slices: the order in which a copy moves the bytes of its sources, and in which pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from moepass.passes.machine.times import SLICE_BYTES as SLICE_BYTES
from moepass.passes.machine.times import stream_slice_bytes
from moepass.runtime.transfer.sources import Source

# A source, an offset in it, a number of bytes, and the offset in the slot that they go to.
Slice = tuple[Source, int, int, int]


def check_slot(sources: Sequence[Source], slot: torch.Tensor) -> None:
    """Raise ValueError if a piece of `sources` would not fit into `slot`."""
    needed = max((piece.slot_offset_bytes + piece.nbytes for source in sources for piece in source.pieces), default=0)
    if not slot.is_contiguous() or slot.numel() < needed:
        raise ValueError(f"{needed} contiguous bytes do not fit a slot of {slot.numel()}")


def slices(source: Source, slice_bytes: int | None = None) -> Iterator[Slice]:
    """Yield the slices of `source` in order, each at most `slice_bytes` long, by default SLICE_BYTES."""
    step = slice_bytes or SLICE_BYTES
    for piece in source.pieces:
        for start in range(0, piece.nbytes, step):
            size = min(step, piece.nbytes - start)
            yield source, piece.source_offset_bytes + start, size, piece.slot_offset_bytes + start


def round_robin_slices(sources: Sequence[Source], slice_bytes: int | None = None) -> Iterator[Slice]:
    """Yield one slice of each source, then the next of each, so that all sources are read at the same time."""
    for slices_of_all in itertools.zip_longest(*[slices(source, slice_bytes) for source in sources]):
        yield from (item for item in slices_of_all if item is not None)


def stream_slices(sources: Sequence[Source]) -> Iterator[Slice]:
    """Yield slices as `round_robin_slices`, few enough that issuing them does not delay the host's kernel launches.

    A single source is not cut: there is no second source to alternate with, and a copy on a stream cannot be
    abandoned.
    """
    nbytes = sum(source.nbytes for source in sources)
    nonempty = sum(1 for source in sources if source.pieces)
    return round_robin_slices(sources, stream_slice_bytes(nbytes) if nonempty > 1 else max(1, nbytes))
