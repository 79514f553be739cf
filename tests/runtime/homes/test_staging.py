"""Staging buffers without processes: their contents, the waits for them, and that no bank is mistaken for another."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import Piece
from moepass.runtime.homes.hybrid import staging_board
from moepass.runtime.homes.hybrid.staged_pull import StageAction, StagedPull, StagedSource, WaitLimit
from moepass.runtime.homes.hybrid.stager import Found, Held, Stager, StagerError, StagingBuffers, _StagerWork
from moepass.runtime.homes.hybrid.staging_board import StagingBoard, board_bytes, pack_state, unpack_state
from moepass.runtime.homes.hybrid.staging_order import StagingPlan, StagingState, Wants, choose_banks
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copying import CopyThread, SlotCopy
from moepass.runtime.transfer.lanes import HOST_LANE, Lane
from moepass.runtime.transfer.link import BusyLink, Link
from moepass.runtime.transfer.sources import MemorySource, Source, whole
from tests.helpers.processes.emulated_clock import EmulatedClock

SLICE = 16


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SLICE_BYTES", SLICE)


def _board(buffers: int) -> StagingBoard:
    return StagingBoard(torch.zeros(board_bytes(buffers), dtype=torch.uint8), buffers)


def _staging(count: int, nbytes: int) -> StagingBuffers:
    return StagingBuffers(_board(count), [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)], SLICE)


def _shard(bank: int, nbytes: int) -> torch.Tensor:
    """Return a shard of a byte that no other bank has."""
    return torch.full((nbytes,), bank + 1, dtype=torch.uint8)


banks = st.integers(0, 5)
wants = st.builds(Wants, st.lists(banks, max_size=4, unique=True).map(tuple), st.booleans())


@given(st.lists(wants, min_size=1, max_size=4), st.integers(1, 4))
def test_the_nearest_needs_come_first_and_those_of_running_ranks_before_others(
    of_ranks: list[Wants], count: int
) -> None:
    chosen = choose_banks(of_ranks, count)
    wanted = {bank for want in of_ranks for bank in want.banks}
    assert len(chosen) == len(set(chosen)) == min(count, len(wanted))

    def rank_of(bank: int) -> tuple[bool, int]:
        """Return the urgency of a bank for the rank that needs it most; smaller is more urgent."""
        return min((not want.is_running, want.banks.index(bank)) for want in of_ranks if bank in want.banks)

    assert [rank_of(bank) for bank in chosen] == sorted(rank_of(bank) for bank in wanted)[: len(chosen)]


def test_a_rank_that_runs_ahead_keeps_what_a_later_one_reads() -> None:
    ahead, behind, resting = Wants((3, 4), True), Wants((2, 3), True), Wants((0, 1), False)
    assert choose_banks([ahead, behind, resting], 2) == (3, 2)
    assert choose_banks([ahead, behind, resting], 3) == (3, 2, 4)
    assert choose_banks([resting, behind], 2) == (2, 3)
    assert choose_banks([resting], 2) == (0, 1)


@given(
    st.lists(st.one_of(st.lists(banks, max_size=3, unique=True), st.integers(1, 5)), max_size=30),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_chosen_banks_get_stages_and_are_filled_in_order(actions: list[list[int] | int], slices: list[int]) -> None:
    plan = StagingPlan(3, slices)
    chosen: list[int] = []
    for action in actions:
        before = list(plan.states)
        if isinstance(action, list):
            chosen = action
            taken = plan.choose(chosen)
            assert set(chosen) <= {state.bank for state in plan.states}
            for buffer, (old, new) in enumerate(zip(before, plan.states, strict=True)):
                if buffer in taken:
                    assert old.bank not in chosen
                    assert new == StagingState(new.bank, old.generation + 1, 0)
                else:
                    assert new == old
            continue
        for _ in range(action):
            fill = plan.next_fill()
            held = {state.bank: state for state in plan.states}
            missing = [bank for bank in chosen if held[bank].filled_slices < slices[bank]]
            assert (fill is None) == (not missing)
            if fill is not None:
                assert fill.bank == missing[0] == plan.states[fill.buffer].bank
                assert fill.slice_number == held[fill.bank].filled_slices
                plan.filled(fill.buffer)
    held_banks = [state.bank for state in plan.states if state.bank is not None]
    assert len(held_banks) == len(set(held_banks))


@given(
    st.one_of(st.none(), st.integers(0, staging_board.MOST_BANKS - 1)),
    st.integers(0, 2**32 - 1),
    st.integers(0, staging_board.MOST_SLICES),
)
def test_a_word_says_all_of_a_state(bank: int | None, generation: int, filled: int) -> None:
    state = StagingState(bank, generation, filled)
    assert 0 <= pack_state(state) < 2**64
    assert unpack_state(pack_state(state)) == state


def test_a_fresh_board_says_nothing_and_keeps_what_is_shown() -> None:
    board = _board(3)
    assert board.wants() == Wants((), False)
    assert [board.state(buffer) for buffer in range(3)] == [StagingState()] * 3
    board.show_wants((4, 0, 2, 9))
    board.show_running(True)
    board.show_state(1, StagingState(7, 2**32 + 5, 3))
    board.show_progress()
    assert board.wants() == Wants((4, 0, 2), True)
    assert [board.state(buffer) for buffer in range(3)] == [StagingState(), StagingState(7, 5, 3), StagingState()]
    assert board.progress() == 1


@dataclasses.dataclass(frozen=True, eq=False)
class _HalfwaySource(MemorySource):
    """A source that calls `halfway` when half of a copy is done."""

    halfway: Callable[[], None] = lambda: None

    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        half = nbytes // 2
        super().copy(offset_bytes, half, address)
        self.halfway()
        super().copy(offset_bytes + half, nbytes - half, address + half)


IN_HOST_MEMORY = 99
_bring = HOST_LANE.bring


class _SlowLane(Lane):
    """Copies from staging buffers by `bring_staged`."""

    def __init__(self, bring_staged: Callable[[Source, int, torch.Tensor], None]) -> None:
        self._bring_staged = bring_staged

    def bring(self, source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        (super().bring if isinstance(source, StagedSource) else self._bring_staged)(source, offset_bytes, target)


def _copy_staged(
    staging: StagingBuffers,
    bank: int,
    offset: int,
    slot: torch.Tensor,
    bring_staged: Callable[[Source, int, torch.Tensor], None] = _bring,
) -> bool:
    """Fill `slot` from `staging`, else from a shard of IN_HOST_MEMORY; return whether all bytes were staged."""
    shard = torch.full((offset + slot.numel(),), IN_HOST_MEMORY, dtype=torch.uint8)
    source = StagedSource(shard, (Piece(offset, 0, slot.numel()),), True, bank, staging)
    transport = StagedPull(Link())
    transport.patience = lambda nbytes: WaitLimit(0.0, 0.0, {})  # type: ignore[method-assign]
    copy = SlotCopy([source], slot, "bank", StageAction(transport, mock.Mock(), bank), _SlowLane(bring_staged))
    copy.perform(Link())
    return copy.staged_bytes == slot.numel()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_of_another_bank_are_never_used(data: st.DataObject) -> None:
    """Let the stager continue when a reader has read half of its bytes, and let readers interrupt the stager."""
    sizes = data.draw(st.lists(st.integers(1, 3 * SLICE), min_size=2, max_size=3), label="bytes of the shards")
    numbers = st.integers(0, len(sizes) - 1)
    staging = _staging(data.draw(st.integers(1, 2), label="buffers"), max(sizes))

    def read(meanwhile: Callable[[], None]) -> None:
        bank = data.draw(numbers, label="bank")
        start = data.draw(st.integers(0, sizes[bank] - 1), label="from")
        nbytes = data.draw(st.integers(1, sizes[bank] - start), label="bytes")
        slot = torch.zeros(nbytes, dtype=torch.uint8)

        def halfway(source: Source, offset_bytes: int, target: torch.Tensor) -> None:
            half = target.numel() // 2
            _bring(source, offset_bytes, target[:half])
            meanwhile()
            _bring(source, offset_bytes + half, target[half:])

        expected = bank + 1 if _copy_staged(staging, bank, start, slot, halfway) else IN_HOST_MEMORY
        assert set(slot.tolist()) == {expected}

    def read_between() -> None:
        if data.draw(st.booleans(), label="somebody reads"):
            read(meanwhile=lambda: None)

    def work_on() -> None:
        for wanted, steps in data.draw(st.lists(st.tuples(numbers, st.integers(1, 3)), max_size=3), label="work"):
            staging.board.show_wants((wanted,))
            for _ in range(steps):
                work.step()

    shards = [
        _HalfwaySource(_shard(bank, size), (Piece(0, 0, size),), halfway=read_between)
        for bank, size in enumerate(sizes)
    ]
    work = _StagerWork(staging, [], shards, BusyLink(Link()))
    for _ in range(data.draw(st.integers(1, 6), label="rounds")):
        work_on()
        read(meanwhile=work_on)


def test_a_stage_that_is_overwritten_in_the_middle_of_a_copy_is_not_believed(small_slices: None) -> None:
    staging = _staging(1, 2 * SLICE)
    work = _StagerWork(staging, [], [whole(_shard(bank, 2 * SLICE)) for bank in range(2)], BusyLink(Link()))
    slot = torch.zeros(SLICE, dtype=torch.uint8)

    def fill(bank: int, steps: int = 3) -> None:
        staging.board.show_wants((bank,))
        for _ in range(steps):
            work.step()

    fill(0)
    assert _copy_staged(staging, 0, 0, slot)
    assert slot.tolist() == [1] * SLICE
    assert staging.find_buffer(1, 0, SLICE) is Found.ABSENT
    copied: list[int] = []

    def overwritten(source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        fill(1, steps=1)
        _bring(source, offset_bytes, target)
        copied.extend(target.tolist())

    assert not _copy_staged(staging, 0, 0, slot, overwritten)
    assert copied == [2] * SLICE  # the bytes of another bank
    assert slot.tolist() == [IN_HOST_MEMORY] * SLICE
    assert _copy_staged(staging, 1, 0, slot)
    assert staging.find_buffer(1, SLICE, SLICE) is Found.COMING


def test_a_bank_that_left_its_stage_and_came_back_while_it_was_copied_is_not_believed() -> None:
    staging = _staging(1, 2 * SLICE)
    work = _StagerWork(staging, [], [whole(_shard(bank, 2 * SLICE)) for bank in range(2)], BusyLink(Link()))
    slot = torch.zeros(SLICE, dtype=torch.uint8)
    copied: list[int] = []

    def leave_and_come_back(source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        for bank, steps in ((1, 2), (0, 1)):
            staging.board.show_wants((bank,))
            for _ in range(steps):
                work.step()
        _bring(source, offset_bytes, target)
        copied.extend(target.tolist())

    staging.board.show_wants((0,))
    work.step()
    work.step()
    assert not _copy_staged(staging, 0, SLICE, slot, leave_and_come_back)
    assert copied == [2] * SLICE
    assert slot.tolist() == [IN_HOST_MEMORY] * SLICE


def test_no_copy_waits_for_a_stalled_rank_or_longer_than_fetching_takes() -> None:
    stalled: dict[object, int] = {}
    patience = WaitLimit(1.0, 0.1, stalled)
    assert patience.waits_for("a", 5, 10.0)
    assert patience.waits_for("a", 5, 10.09)
    assert patience.waits_for("a", 6, 10.15)
    assert patience.waits_for("a", 6, 10.24)
    assert not patience.waits_for("a", 6, 10.26)
    assert stalled == {"a": 6}
    assert patience.waits_for("b", 1, 10.3)
    # No other copy waits for that rank until it makes progress.
    later = WaitLimit(1.0, 0.1, stalled)
    assert not later.waits_for("a", 6, 20.0)
    assert later.waits_for("a", 7, 20.0)
    later.waited(0.6)
    assert later.waits_for("a", 8, 20.05)
    later.waited(0.5)
    assert not later.waits_for("a", 9, 20.1)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.001)


def _stagers() -> int:
    return sum(thread.name == "moepass-stager" for thread in threading.enumerate())


def test_a_stager_fills_the_banks_that_any_rank_wants_and_ends_with_its_owner(small_slices: None) -> None:
    staging, peer_board = _staging(2, 3 * SLICE), _board(2)
    shards = [whole(_shard(bank, 2 * SLICE + 5)) for bank in range(5)]
    before = _stagers()
    filler = Stager(staging, [peer_board], shards, BusyLink(Link()))

    def complete() -> set[int | None]:
        states = [staging.board.state(buffer) for buffer in range(2)]
        return {state.bank for state in states if state.filled_slices == 3}

    filler.reading(2)
    _wait_until(lambda: complete() == {2, 3})
    filler.has_read(2)
    _wait_until(lambda: complete() == {3, 4})
    # Another rank is in a run, and this one is idle.
    peer_board.show_wants((1, 0))
    peer_board.show_running(True)
    _wait_until(lambda: complete() == {1, 0})
    # The last bank is followed by the first, or, after a run in another order, by its successor in that run.
    filler.show_running(True)
    filler.reading(4)
    _wait_until(lambda: complete() == {4, 1})
    assert staging.board.wants().banks == (4, 0)
    for bank in (4, 2, 4):
        filler.learn(bank)
    filler.has_read(4)
    assert staging.board.wants().banks == (2, 4)
    filler.check()
    reference = weakref.ref(filler)
    del filler
    gc.collect()
    assert reference() is None
    _wait_until(lambda: _stagers() == before)
    assert staging.board.wants() == Wants((), False)


def test_a_stager_that_fails_says_so_in_the_next_run(small_slices: None) -> None:
    class Broken(MemorySource):
        def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
            raise OSError("no such memory")

    staging = _staging(1, SLICE)
    transport = StagedPull(Link())
    transport.stager = Stager(staging, [], [Broken(_shard(0, SLICE), (Piece(0, 0, SLICE),))], transport.host_link)
    transport.begin_run()
    failing = transport.stager
    assert failing is not None
    failing.reading(0)
    _wait_until(lambda: failing._work.error is not None)
    transport.end_run()
    with pytest.raises(StagerError, match="the staging buffers of this rank are no longer filled: no such memory"):
        transport.begin_run()


class _Ranks:
    """Two ranks in one process: this one with a stager, and another whose buffers the test fills by hand."""

    def __init__(self, nbytes: int = 3 * SLICE, host_link: Link = Link()) -> None:  # noqa: B008
        self.transport = StagedPull(host_link)
        self.own, self.other = _staging(2, nbytes), _staging(2, nbytes)
        self.shards = [[_shard(2 * bank + rank, nbytes) for bank in range(3)] for rank in range(2)]
        self.stager = Stager(
            self.own, [self.other.board], [whole(shard) for shard in self.shards[0]], self.transport.host_link
        )
        self.transport.stager = self.stager
        self.work = _StagerWork(self.other, [], [whole(shard) for shard in self.shards[1]], BusyLink(Link()))

    def fill_other(self, bank: int, steps: int = 4) -> None:
        self.other.board.show_wants((bank,))
        for _ in range(steps):
            self.work.step()

    def copy(self, bank: int, slot: torch.Tensor) -> SlotCopy:
        shard, peer_shard = (shards[bank] for shards in self.shards)
        size = shard.numel()
        spec = BankSpec(bank, f"layers.{bank}", "hybrid", BankFormat.plain(2 * size), ())
        sources = [
            StagedSource(peer_shard, (Piece(0, size, size),), True, bank, self.other),
            StagedSource(shard, (Piece(0, 0, size),), False, bank, self.own),
        ]
        return SlotCopy(sources, slot, spec.name, self.transport.action(spec, sources))

    def expected(self, bank: int) -> torch.Tensor:
        return torch.cat([shards[bank] for shards in self.shards])


def test_a_copy_takes_what_is_staged_and_the_rest_from_host_memory(small_slices: None) -> None:
    ranks = _Ranks()
    slot = torch.zeros(6 * SLICE, dtype=torch.uint8)
    for bank, staged in ((1, 1), (2, 0), (0, 1)):
        if staged:
            ranks.fill_other(bank)
        ranks.stager.reading(bank)
        _wait_until(lambda bank=bank: isinstance(ranks.own.find_buffer(bank, 0, 3 * SLICE), Held))
        slot.fill_(0xFF)
        copy = ranks.copy(bank, slot)
        copy.perform(Link())
        assert torch.equal(slot, ranks.expected(bank))
        assert copy.staged_bytes == (3 + 3 * staged) * SLICE
        assert copy.unstaged_bytes == (3 - 3 * staged) * SLICE


def test_a_copy_follows_a_stage_that_is_being_filled(small_slices: None) -> None:
    ranks = _Ranks()
    ranks.fill_other(1, steps=0)
    ranks.work.step()  # one slice of three
    slot = torch.zeros(6 * SLICE, dtype=torch.uint8)
    thread = CopyThread(Link())
    # The limit on waiting is irrelevant in this test.
    ranks.transport.patience = lambda nbytes: WaitLimit(10.0, 10.0, {})  # type: ignore[method-assign]
    copy = thread.submit(ranks.copy(1, slot))
    time.sleep(0.01)
    assert not copy.finished.is_set()
    ranks.fill_other(1)
    copy.wait()
    assert torch.equal(slot, ranks.expected(1))
    assert copy.unstaged_bytes <= 3 * SLICE  # slices of this rank's own shard


def test_a_stage_that_stops_half_way_delays_a_copy_once(small_slices: None) -> None:
    ranks = _Ranks()
    ranks.fill_other(1, steps=1)
    slot = torch.zeros(6 * SLICE, dtype=torch.uint8)
    for _ in range(2):
        slot.fill_(0)
        copy = ranks.copy(1, slot)
        copy.perform(Link())
        assert torch.equal(slot, ranks.expected(1))
        assert copy.unstaged_bytes >= 2 * SLICE
    assert ranks.transport._stalled == {ranks.other: 1}


def test_a_stage_that_is_overwritten_while_it_is_copied_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    ranks = _Ranks()
    ranks.fill_other(1)
    real = ctypes.memmove
    buffer = next(memory for memory in ranks.other.memories if int(memory[0]) == 4)
    begins = itertools.count()

    def overwritten(target: int, source: int, nbytes: int) -> None:
        if source == buffer.data_ptr() + SLICE and next(begins) == 0:
            ranks.fill_other(0)
            ranks.fill_other(2)  # in the buffer that holds bank 1
        real(target, source, nbytes)

    monkeypatch.setattr(ctypes, "memmove", overwritten)
    slot = torch.zeros(6 * SLICE, dtype=torch.uint8)
    copy = ranks.copy(1, slot)
    copy.perform(Link())
    assert next(begins) == 1
    assert int(buffer[0]) == 6
    assert torch.equal(slot, ranks.expected(1))
    assert copy.unstaged_bytes >= 2 * SLICE


def test_links_carry_one_copy_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EmulatedClock(monkeypatch)
    link, never = BusyLink(Link(1000.0)), clock.event()
    for _ in range(2):  # both copies wait at the same time
        link.moved(50, 0.0, never)
    assert clock.seconds == pytest.approx(0.1)
    assert link.expected_seconds(1000) >= 1.0
    never.set()
    link.moved(10_000, clock.seconds, never)
    assert clock.seconds == pytest.approx(0.1)


def test_only_bytes_past_a_stage_take_time_on_the_host_link(
    small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _Ranks(nbytes=3 * SLICE, host_link=Link(1e9))
    ranks.fill_other(1)
    ranks.stager.reading(1)
    slot = torch.zeros(6 * SLICE, dtype=torch.uint8)
    _wait_until(lambda: isinstance(ranks.own.find_buffer(1, 0, 3 * SLICE), Held))
    ranks.transport.host_link = BusyLink(Link(1.0))  # a second for each byte
    clock = EmulatedClock(monkeypatch)
    copy = ranks.copy(1, slot)
    copy.perform(Link(3 * SLICE / 0.1))  # no time for this rank's own shard
    assert clock.seconds == pytest.approx(0.1)
    assert copy.unstaged_bytes == 0
