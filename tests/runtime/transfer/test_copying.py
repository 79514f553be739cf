"""Copies from several sources: round robin, within bounds, and timed by the bytes that cross the link."""

from __future__ import annotations

import ctypes

import pytest
import torch

from moepass.passes.ir.shards import Piece
from moepass.passes.machine.times import MOST_STREAM_SLICES, SLICE_BYTES
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copying import CopyError, CopyThread, SlotCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource
from tests.helpers.processes.emulated_clock import EmulatedClock


def _bytes(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_slices_come_from_all_sources_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SLICE_BYTES", 10)
    memories = [_bytes(30, 1), _bytes(0, 2), _bytes(25, 3)]
    sources = [
        MemorySource(memories[0], (Piece(0, 0, 15), Piece(15, 40, 15))),
        MemorySource(memories[1], ()),
        MemorySource(memories[2], (Piece(0, 15, 25),)),
    ]
    order: list[tuple[int, int]] = []
    real = ctypes.memmove

    def recording(target: int, source: int, size: int) -> object:
        owner = next(
            index for index, m in enumerate(memories) if m.numel() and m.data_ptr() <= source < m.data_ptr() + m.numel()
        )
        order.append((owner, size))
        return real(target, source, size)

    monkeypatch.setattr(ctypes, "memmove", recording)
    slot = torch.zeros(60, dtype=torch.uint8)
    CopyThread(Link()).submit(SlotCopy(sources, slot, "layer")).wait()
    assert order == [(0, 10), (2, 10), (0, 5), (2, 10), (0, 10), (2, 5), (0, 5)]
    assert slot.tolist() == [1] * 15 + [3] * 25 + [1] * 15 + [0] * 5


def _from_ranks(ranks: int, nbytes: int) -> list[MemorySource]:
    """Return the sources of a bank of two tensors in equal shards, without any memory."""
    size, memory = nbytes // 2 // ranks, torch.empty(0, dtype=torch.uint8)
    return [
        MemorySource(memory, (Piece(0, rank * size, size), Piece(size, nbytes // 2 + rank * size, size)))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 30, 5 << 30])
def test_a_stream_gets_few_slices_from_many_ranks_round_robin(nbytes: int) -> None:
    sources = _from_ranks(8, nbytes)
    slices = list(lanes.stream_slices(sources))
    assert sum(size for _, _, size, _ in slices) == nbytes
    assert len(slices) <= MOST_STREAM_SLICES + 2 * 8
    # Every source comes once before any comes again.
    assert [source for source, *_ in slices[:8]] == sources
    if nbytes >= SLICE_BYTES * 8 * 4:
        assert [source for source, *_ in slices[8:16]] == sources


def test_a_stream_copies_whole_pieces_of_a_single_source() -> None:
    slices = list(lanes.stream_slices(_from_ranks(1, 5 << 30)))
    assert [size for _, _, size, _ in slices] == [5 << 29, 5 << 29]


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(0, 15, 10), "25 contiguous bytes do not fit a slot of 20"),
        (Piece(5, 0, 10), "a source of 12 bytes is read up to byte 15"),
    ],
)
def test_pieces_out_of_bounds_are_refused(piece: Piece, message: str) -> None:
    slot = torch.zeros(20, dtype=torch.uint8)
    sources = [MemorySource(_bytes(12, 1), (Piece(0, 0, 12),)), MemorySource(_bytes(12, 1), (piece,))]
    with pytest.raises(CopyError, match=f"bank layer .*{message}"):
        CopyThread(Link()).submit(SlotCopy(sources, slot, "layer")).wait()
    assert int(slot.sum()) == 0


def test_an_emulated_link_counts_only_bytes_over_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EmulatedClock(monkeypatch)
    slot = torch.zeros(2000, dtype=torch.uint8)
    far = MemorySource(_bytes(1000, 1), (Piece(0, 0, 1000),))
    near = MemorySource(_bytes(1000, 1), (Piece(0, 1000, 1000),), over_link=False)
    thread = CopyThread(Link(5000.0))
    for sources, seconds in (([far, near], 0.2), ([near], 0.0), ([far, far], 0.4)):
        started = clock.seconds
        thread.submit(SlotCopy(sources, slot, "layer")).wait()
        assert clock.seconds - started == pytest.approx(seconds)
