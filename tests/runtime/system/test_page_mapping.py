"""This rank's own shard is laid into slots page by page, and reads as if it had been copied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.shards import Piece
from moepass.runtime.system.page_mapping import has_written_pages
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment, create_segment
from moepass.runtime.system.slot_pages import slot_memory
from moepass.runtime.transfer.copying import CopyError, CopyThread, PendingCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import SegmentSource

PAGES = 64
NBYTES = PAGES * PAGE_BYTES


def _segment(seed: int = 0) -> tuple[SharedSegment, torch.Tensor]:
    segment = create_segment(NBYTES, "test")
    memory = segment.map(0, NBYTES)
    memory.copy_(torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return segment, memory


def _source(segment: SharedSegment, memory: torch.Tensor, *pieces: Piece, place: int = 0) -> SegmentSource:
    return SegmentSource(memory[place:], pieces, over_link=False, segment=segment, segment_offset_bytes=place)


def _fill(slot: torch.Tensor, *sources: SegmentSource) -> None:
    PendingCopy(sources, slot, "layer").perform(Link())


def _laid_kib(slot: torch.Tensor) -> int:
    """Kilobytes of the slot's address range that belong to a segment, by the kernel's account."""
    begin, end, laid = slot.data_ptr(), slot.data_ptr() + slot.numel(), 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            if begin <= first < end and "memfd:" in line:
                laid += last - first
    return laid >> 10


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3), st.integers(0, NBYTES - 1), st.integers(1, NBYTES), st.integers(0, 2 * PAGE_BYTES), st.booleans()
)
def test_a_slot_reads_as_if_all_had_been_copied(
    place_pages: int, source: int, nbytes: int, shift: int, aligned: bool
) -> None:
    place = place_pages * PAGE_BYTES
    source = min(source, NBYTES - place - 1)
    nbytes = min(nbytes, NBYTES - place - source)
    offset = source % PAGE_BYTES if aligned else shift
    segment, memory = _segment()
    slot = slot_memory(NBYTES + 3 * PAGE_BYTES)
    slot.fill_(7)
    expected = slot.clone()
    expected[offset : offset + nbytes] = memory[place + source : place + source + nbytes]
    _fill(slot, _source(segment, memory, Piece(source, offset, nbytes), place=place))
    assert torch.equal(slot, expected)
    if not aligned and (offset - source) % PAGE_BYTES:
        assert _laid_kib(slot) == 0


def test_whole_pages_are_not_copied() -> None:
    segment, memory = _segment()
    slot = slot_memory(NBYTES)
    _fill(slot, _source(segment, memory, Piece(0, 0, NBYTES)))
    assert _laid_kib(slot) == NBYTES >> 10


def test_what_is_written_into_a_slot_stays_there_until_it_is_filled_again() -> None:
    segment, memory = _segment()
    before = memory.clone()
    slot = slot_memory(NBYTES)
    source = _source(segment, memory, Piece(0, 0, NBYTES))
    _fill(slot, source)
    slot.fill_(255)
    assert torch.equal(memory, before)
    _fill(slot, source)
    assert torch.equal(slot, before)


def test_one_slot_serves_banks_of_different_layouts() -> None:
    (first, a), (second, b) = _segment(1), _segment(2)
    kept = a.clone(), b.clone()
    slot = slot_memory(NBYTES)
    half = NBYTES // 2
    for _ in range(2):
        _fill(slot, _source(first, a, Piece(0, 0, half)), _source(second, b, Piece(0, half, half)))
        assert torch.equal(slot, torch.cat([a[:half], b[:half]]))
        _fill(slot, _source(first, a, Piece(half + 5, 5, half - 5)), _source(second, b, Piece(1, half, half)))
        assert torch.equal(slot[5:half], a[half + 5 :])
        assert torch.equal(slot[half:], b[1 : half + 1])
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


def test_a_mapping_that_fails_is_an_error_of_that_copy() -> None:
    segment, memory = _segment()
    slot = slot_memory(NBYTES)
    source = _source(segment, memory, Piece(0, 0, NBYTES))
    segment._close()
    copy = CopyThread(Link()).submit(PendingCopy([source], slot, "layer"))
    with pytest.raises(CopyError, match=r"bank layer .*cannot be mapped: Bad file descriptor"):
        copy.wait()


def test_pages_say_whether_they_were_written() -> None:
    nbytes = 5 * PAGE_BYTES
    segment = create_segment(nbytes, "test")
    segment.map(0, nbytes).fill_(1)
    memory = torch.frombuffer(segment.map_privately(0, nbytes), dtype=torch.uint8)
    address = memory.data_ptr()
    if has_written_pages(address, nbytes) is None:
        pytest.skip("this system keeps /proc/self/pagemap to itself")
    assert has_written_pages(address, nbytes) is False
    assert int(memory.sum()) == nbytes
    assert has_written_pages(address, nbytes) is False
    memory[2 * PAGE_BYTES] = 1
    written = [has_written_pages(address + page * PAGE_BYTES, PAGE_BYTES) for page in range(5)]
    assert written == [False, False, True, False, False]
    assert has_written_pages(address + 2 * PAGE_BYTES - 1, 2) is True
    assert has_written_pages(address + PAGE_BYTES + 1, PAGE_BYTES - 1) is False
