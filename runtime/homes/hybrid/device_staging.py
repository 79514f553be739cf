"""Staging buffers in the memory of GPUs: the host writes and reads words on boards, streams copy the bytes.

A process cannot wait for an event of another process. So a word contains only what the host of its rank has seen
completed: it changes before a copy into the buffer is issued, and again once the event behind that copy has happened.
A reader reads the word before it issues a copy from the buffer, and again once the event behind that copy has happened.
If the word is the same both times, no byte was overwritten in between.

Two ranks on one H100 have run it; its speed is unmeasured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.homes.hybrid.staged_pull import StagedPull, StagedSource
from moepass.runtime.homes.hybrid.stager import Found, Held, Stager, StagingBuffers
from moepass.runtime.homes.hybrid.staging_board import StagingBoard
from moepass.runtime.transfer import copying
from moepass.runtime.transfer.copy_lane import CopyLane, IssuedCopy
from moepass.runtime.transfer.copying import check_slot, slices_for_stream
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source

# The link is idle while the thread waits for the end of a slice, so slices are large.
_SLICES_AT_ONCE = 4
_PAUSE_S = 0.0005


class DeviceStagingBuffers(StagingBuffers):
    """Staging buffers in device memory.

    Args:
        board: the board that describes them.
        memories: the buffers, flat uint8.
        stream: the stream on which this rank fills its buffers; None for the buffers of another rank.
        keeps: an object that must live as long as the buffers are read.
    """

    def __init__(
        self, board: StagingBoard, memories: Sequence[torch.Tensor], stream: torch.cuda.Stream | None, keeps: object
    ) -> None:
        super().__init__(board, memories, _SLICES_AT_ONCE * copying.SLICE_BYTES, keeps)
        self._stream = stream

    def write(self, buffer: int, shard: Source, offset_bytes: int, nbytes: int) -> None:
        """Copy bytes of `shard` into a buffer of this rank, and wait for the copy."""
        assert self._stream is not None, "each rank fills its own buffers"
        assert isinstance(shard, MemorySource), "shards rest in host memory"
        with torch.cuda.stream(self._stream):
            target = self.memories[buffer].narrow(0, offset_bytes, nbytes)
            target.copy_(shard.memory.narrow(0, offset_bytes, nbytes), non_blocking=True)
            done = recorded_event(self._stream)
        done.synchronize()


@dataclasses.dataclass(frozen=True)
class _StagedSlice:
    """A copy from a staging buffer that was issued; its bytes are valid if the buffer still `held` them afterwards."""

    source: StagedSource
    held: Held
    offset_bytes: int
    target: torch.Tensor


class IssuedStagedCopy(IssuedCopy):
    """A copy from the staging buffers of all ranks, or from their shards in host memory, into a slot on a GPU."""

    def __init__(
        self,
        transport: StagedPull,
        stager: Stager,
        bank: BankSpec,
        sources: Sequence[Source],
        slot: torch.Tensor,
        lane: CopyLane,
        after: object,
    ) -> None:
        super().__init__(sources, slot, bank.name, lane, after)
        self._transport = transport
        self._stager = stager
        self._bank = bank.index

    def issue(self) -> None:
        """Wait until the slot is free, and copy all slices into it."""
        check_slot(self.sources, self.slot)
        for source in self.sources:
            source.check_bounds()
        if isinstance(self.after, torch.cuda.Event):
            # Buffers are looked up once the slot is free, because they may be refilled until then.
            self.after.synchronize()
        self._stager.reading(self._bank)
        try:
            self._check(self._issue_slices())
        finally:
            self._stager.has_read(self._bank)

    def _issue_slices(self) -> list[_StagedSlice]:
        patience = self._transport.patience(sum(source.nbytes for source in self.sources))
        staged: list[_StagedSlice] = []
        for source, offset, size, slot_offset in slices_for_stream(self.sources):
            assert isinstance(source, StagedSource), "with home hybrid every rank has staging buffers"
            assert source.staging is not None
            target, began = self.slot.narrow(0, slot_offset, size), time.perf_counter()
            state = source.staging.look_for(source.bank, offset, size)
            while state is Found.COMING and patience.waits_for(source.staging, source.staging.board.progress(), began):
                if self.abandoned.wait(_PAUSE_S):
                    break
                patience.waited(time.perf_counter() - began)
                began = time.perf_counter()
                state = source.staging.look_for(source.bank, offset, size)
            if self.abandoned.is_set():
                return staged
            if isinstance(state, Held):
                buffer = source.staging.memories[state.buffer]
                target.copy_(buffer.narrow(0, offset, size), non_blocking=True)
                staged.append(_StagedSlice(source, state, offset, target))
                continue
            self._bring_from_host(source, offset, target)
        return staged

    def _check(self, staged: Sequence[_StagedSlice]) -> None:
        """Copy from host memory every slice whose buffer was overwritten before the copy ended."""
        if not staged:
            return
        recorded_event(self.lane.stream).synchronize()
        for copied in staged:
            assert copied.source.staging is not None
            if copied.source.staging.still_holds(copied.held):
                self.staged_bytes += copied.target.numel()
            else:
                self._bring_from_host(copied.source, copied.offset_bytes, copied.target)

    def _bring_from_host(self, source: StagedSource, offset_bytes: int, target: torch.Tensor) -> None:
        self.lane.bring(source, offset_bytes, target)
        self.unstaged_bytes += target.numel()


class DeviceStagedPull(StagedPull):
    """The transport `pull` of home `hybrid` into slots on a GPU."""

    def issued_copy(
        self, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor, lane: CopyLane, after: object
    ) -> IssuedCopy:
        """Return a copy of `bank` into `slot`."""
        if self._stager is None:
            return super().issued_copy(bank, sources, slot, lane, after)
        return IssuedStagedCopy(self, self._stager, bank, sources, slot, lane, after)
