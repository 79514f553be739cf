"""Pages that move out of a slot and in again are those of their segment, whatever happened to the slot meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.shards import Piece
from moepass.runtime import page_mapping, slot_pages
from moepass.runtime.copying import PendingCopy
from moepass.runtime.link import Link
from moepass.runtime.shared_memory import PAGE_BYTES, SharedSegment, create_segment
from moepass.runtime.slot_pages import slot_memory
from moepass.runtime.sources import MemorySource, SegmentSource, Source

PAGES = 64
NBYTES = PAGES * PAGE_BYTES


class _Bank:
    """A bank of which this rank has [begin, end) in a segment, and another rank the rest."""

    def __init__(self, seed: int, begin: int = 0, end: int = NBYTES // 2) -> None:
        self.segment = create_segment(NBYTES, "test")
        own = self.segment.map(0, NBYTES)
        generator = torch.Generator().manual_seed(seed)
        self.complete = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, generator=generator)
        own[: end - begin] = self.complete[begin:end]
        rest = tuple(Piece(at, at, size) for at, size in ((0, begin), (end, NBYTES - end)) if size)
        self.sources: list[Source] = [
            MemorySource(self.complete, rest),
            SegmentSource(
                own, (Piece(0, begin, end - begin),), over_link=False, segment=self.segment, segment_offset_bytes=0
            ),
        ]

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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 1), st.none() | st.tuples(st.integers(0, NBYTES - 1), st.booleans())
        ),
        max_size=12,
    )
)
def test_a_filled_slot_is_its_bank_whatever_came_before(
    steps: list[tuple[int, int, tuple[int, bool] | None]],
) -> None:
    """Banks of three layouts go into two slots; now and then a byte is written there, or all that follow it."""
    layouts = [(0, NBYTES // 2), (0, NBYTES // 2), (16 * PAGE_BYTES, NBYTES), (5, 40 * PAGE_BYTES)]
    banks = [_Bank(seed, *layout) for seed, layout in enumerate(layouts)]
    slots = [slot_memory(NBYTES), slot_memory(NBYTES)]
    expected = [slot.clone() for slot in slots]
    for number, place, write in steps:
        slot = slots[place]
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


def test_a_forked_child_begins_anew() -> None:
    banks = [_Bank(0), _Bank(1)]
    slot = slot_memory(NBYTES)
    _check_rounds([slot], banks, 2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            banks[0].segment.lay = mock.Mock(side_effect=banks[0].segment.lay)  # type: ignore[method-assign]
            _check_rounds([slot], banks, 3)
            status = 0 if banks[0].segment.lay.call_count == 1 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(slot, banks[1].complete)
    _check_rounds([slot], banks, 2)
