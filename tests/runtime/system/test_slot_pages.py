"""Pages that move out of a slot and in again are those of their segment, whatever happened to the slot meanwhile."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.shards import Piece
from moepass.runtime.system import page_mapping, slot_pages
from moepass.runtime.system.page_mapping import TABLE_BYTES
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedMemoryError, SharedSegment, create_segment
from moepass.runtime.system.slot_pages import KeptPages, lay_in_slot, slot_memory
from moepass.runtime.transfer.copying import PendingCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, SegmentSource, Source

PAGES = 64
NBYTES = PAGES * PAGE_BYTES
HALF = NBYTES // 2


class _Bank:
    """A bank of which this rank has [begin, end) in a segment, and another rank the rest."""

    def __init__(self, seed: int, begin: int = 0, end: int = HALF) -> None:
        segment = create_segment(NBYTES, "test")
        own = segment.map(0, NBYTES)
        generator = torch.Generator().manual_seed(seed)
        self.complete = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, generator=generator)
        own[: end - begin] = self.complete[begin:end]
        pieces = (Piece(0, begin, end - begin),)
        self.own = SegmentSource(own, pieces, over_link=False, segment=segment, segment_offset_bytes=0)
        rest = tuple(Piece(at, at, size) for at, size in ((0, begin), (end, NBYTES - end)) if size)
        self.sources: list[Source] = [MemorySource(self.complete, rest), self.own]

    def fill(self, slot: torch.Tensor) -> None:
        PendingCopy(self.sources, slot, "layer").perform(Link())


@pytest.fixture
def mapped() -> Iterator[mock.Mock]:
    """Called for each range that is mapped from a segment anew."""
    with mock.patch.object(SharedSegment, "lay", autospec=True, side_effect=SharedSegment.lay) as lay:
        yield lay


def _check_rounds(slots: list[torch.Tensor], banks: list[_Bank], rounds: int) -> None:
    for turn in range(rounds):
        for number, bank in enumerate(banks):
            slot = slots[(turn * len(banks) + number) % len(slots)]
            bank.fill(slot)
            assert torch.equal(slot, bank.complete)


@pytest.mark.parametrize("slots", [1, 2])
def test_pages_are_mapped_once_and_then_move(mapped: mock.Mock, slots: int) -> None:
    banks = [_Bank(seed) for seed in range(4)]
    _check_rounds([slot_memory(NBYTES) for _ in range(slots)], banks, 3)
    assert mapped.call_count == len(banks)


def _are_there(slot: torch.Tensor, nbytes: int) -> bool:
    """Whether the first `nbytes` of `slot` can be read without a page fault."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(slot.data_ptr() // PAGE_BYTES * 8)
        entries = bytearray(pagemap.read(nbytes // PAGE_BYTES * 8))
    # The highest bit of an entry: in memory.
    return bool((torch.frombuffer(entries, dtype=torch.int64) < 0).all())


def test_nothing_is_left_to_map_when_a_slot_is_full() -> None:
    slot, banks = slot_memory(NBYTES), [_Bank(0), _Bank(1)]
    for _ in range(3):
        for bank in banks:
            bank.fill(slot)
            assert _are_there(slot, HALF)


def test_pages_that_cover_whole_page_tables_and_parts_of_them_move(mapped: mock.Mock) -> None:
    nbytes, begin = 3 * TABLE_BYTES, TABLE_BYTES // 2 + 3 * PAGE_BYTES
    segments = [create_segment(nbytes, "test") for _ in range(2)]
    kept = [KeptPages(segment, 0, nbytes, begin) for segment in segments]
    slot = slot_memory(begin + nbytes)
    for number, segment in enumerate(segments):
        segment.map(0, nbytes).fill_(number + 1)
    for _ in range(3):
        for number, pages in enumerate(kept):
            lay_in_slot(pages, slot)
            assert (slot[begin:] == number + 1).all()
            assert (slot[:begin] == 0).all()
    assert mapped.call_count == 2


def test_where_pages_cannot_move_they_are_mapped_every_time(mapped: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mapping, "_moves_pages", lambda: False)
    _check_rounds([slot_memory(NBYTES)], [_Bank(0), _Bank(1)], 3)
    assert mapped.call_count == 6


def test_where_written_pages_cannot_be_told_they_are_mapped_every_time(
    mapped: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pages, "has_written_pages", lambda address, nbytes: None)
    _check_rounds([slot_memory(NBYTES)], [_Bank(0), _Bank(1)], 3)
    assert mapped.call_count == 6


def _never(address: int, nbytes: int, target: int) -> bool:
    return False


_WRITES = st.none() | st.tuples(st.integers(0, NBYTES - 1), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), _WRITES, st.booleans()), max_size=12))
def test_a_filled_slot_is_its_bank_whatever_came_before(
    steps: list[tuple[int, int, tuple[int, bool] | None, bool]],
) -> None:
    """Banks of four layouts go into two slots; some pages cannot be moved, and some bytes there are written to."""
    more = 48 * PAGE_BYTES
    layouts = [(0, HALF), (0, HALF), (0, more), (16 * PAGE_BYTES, NBYTES), (PAGE_BYTES + 5, more)]
    banks = [_Bank(seed, *layout) for seed, layout in enumerate(layouts)]
    slots = [slot_memory(NBYTES), slot_memory(NBYTES)]
    expected = [slot.clone() for slot in slots]
    for number, place, write, can_move in steps:
        slot = slots[place]
        with mock.patch.object(slot_pages, "move_pages", page_mapping.move_pages if can_move else _never):
            banks[number].fill(slot)
        expected[place] = banks[number].complete.clone()
        if write is not None:
            start, is_long = write
            for memory in (slot, expected[place]):
                memory[start : None if is_long else start + 1] = 255
        assert all(map(torch.equal, slots, expected))


def test_one_bank_may_lie_in_two_slots() -> None:
    bank, other = _Bank(0), _Bank(1)
    slots = [slot_memory(NBYTES), slot_memory(NBYTES)]
    for _ in range(2):
        for kind in (bank, other):
            for slot in slots:
                kind.fill(slot)
            assert all(torch.equal(slot, kind.complete) for slot in slots)


def test_a_new_slot_is_not_taken_for_one_that_is_gone() -> None:
    first, second = _Bank(0), _Bank(1)
    for _ in range(3):
        slot = slot_memory(NBYTES)  # where the one before was
        _check_rounds([slot], [first, second], 2)
        del slot


def _in_a_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _with_limit(kind: int, spare_bytes: int, work: Callable[[], object]) -> None:
    """Do `work` where no more than `spare_bytes` beyond what is in use may be mapped."""
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (max(1, used + spare_bytes), hard))
    try:
        work()
    finally:
        resource.setrlimit(kind, (soft, hard))


def _is_mapped(memory: torch.Tensor) -> bool:
    begin, end, mapped = memory.data_ptr(), memory.data_ptr() + memory.numel(), 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            mapped += max(0, min(last, end) - max(first, begin))
    return mapped == memory.numel()


def test_without_addresses_to_keep_them_at_pages_are_mapped_anew(mapped: mock.Mock) -> None:
    banks, slot = [_Bank(0), _Bank(1)], slot_memory(NBYTES)

    def work() -> None:
        for number in range(5):
            _with_limit(resource.RLIMIT_AS, 1 << 20, functools.partial(banks[number % 2].own.lay, slot))
            assert torch.equal(slot[:HALF], banks[number % 2].complete[:HALF])
        assert mapped.call_count == 5
        assert not page_mapping._has_failed_to_move

    _in_a_child(work)


@pytest.mark.parametrize("fills", [2, 3])
def test_where_the_kernel_fails_to_move_pages_their_places_stay_ours(fills: int) -> None:
    """Into a slot, with two fills before, or out of it, with three."""
    banks, slot = [_Bank(0), _Bank(1)], slot_memory(NBYTES)

    def work() -> None:
        for number in range(fills):
            banks[number % 2].fill(slot)
        with pytest.raises(SharedMemoryError):  # to map anew takes memory too
            _with_limit(resource.RLIMIT_DATA, -(1 << 50), functools.partial(banks[fills % 2].own.lay, slot))
        assert page_mapping._has_failed_to_move
        asides = [aside for bank in banks for kept in bank.own._mapped if (aside := kept._aside) is not None]
        assert len(asides) == fills - 1
        assert all(map(_is_mapped, [slot, *asides]))
        _check_rounds([slot], banks, 2)

    _in_a_child(work)
