"""Transport `pull` of home `hybrid`: shards are copied from staging buffers, or directly from host memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence

import torch

from moepass.models.homes import PULL
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.runtime.homes.hybrid.stager import Found, Held, Stager, StagingBuffers
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copying import COPY_BYTES, Action, SlotCopy
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.link import BusyLink, Link
from moepass.runtime.transfer.sources import MemorySource, Source

# [Empirical] The longest total wait of one copy for staging buffers, as a multiple of the time to fetch the whole bank
# from host memory. Fetching it directly would slow down this rank's copies into its staging buffers.
_PATIENCE = 1.5
# [Empirical] A rank is stalled if its buffers made no progress for the time of this many slices, and for longer than a
# thread waits for the interpreter lock. No copy waits for a stalled rank until it makes progress.
_STALLED_SLICES, _STALLED_S = 4, 0.005
_PAUSE_S = 0.0005


class WaitLimit:
    """A limit on the time that one copy waits for bytes on their way. Times are from `time.perf_counter`.

    It waits `whole_seconds` in total. A rank without progress for `stalled_seconds` is stalled, and the copy does not
    wait for it. `stalled` has the progress of each stalled rank, and outlives the copy.
    """

    def __init__(self, whole_seconds: float, stalled_seconds: float, stalled: dict[Hashable, int]) -> None:
        self._left = whole_seconds
        self._stalled_seconds = stalled_seconds
        self._stalled = stalled
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def waits_for(self, who: Hashable, progress: int, now: float) -> bool:
        """Return whether to wait a little longer for the buffers `who`, whose progress is `progress`."""
        if self._left <= 0 or self._stalled.get(who) == progress:
            return False
        seen, since = self._seen.setdefault(who, (progress, now))
        if seen != progress:
            self._seen[who] = (progress, now)
        elif now - since > self._stalled_seconds:
            self._stalled[who] = progress
            return False
        return True

    def waited(self, seconds: float) -> None:
        """Subtract a pause from the remaining waiting time."""
        self._left -= seconds


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSource(MemorySource):
    """A rank's shard of bank number `bank` in host memory, and that rank's staging buffers, which may hold a copy."""

    bank: int = 0
    staging: StagingBuffers | None = None


class StagedPull(Transport):
    """One-sided copies from staging buffers. `host_link` is the link between this rank and all host memory."""

    def __init__(self, host_link: Link) -> None:
        super().__init__(PULL)
        self.host_link = BusyLink(host_link)
        # The thread that fills this rank's staging buffers, once all ranks have mapped them.
        self.stager: Stager | None = None
        self._stalled: dict[Hashable, int] = {}

    def action(self, bank: BankSpec, sources: Sequence[Source]) -> Action:
        """Return the action that copies `bank` from staging buffers, once there is a stager."""
        return COPY_BYTES if self.stager is None else StageAction(self, self.stager, bank.index)

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """Raise StagerError if the thread that fills this rank's staging buffers has failed."""
        if self.stager is not None:
            self.stager.check()
            self.stager.show_running(True)

    def end_run(self) -> None:
        """Signal to the other ranks that this rank's run has ended."""
        if self.stager is not None:
            self.stager.show_running(False)

    def fail(self, reason: str) -> None:
        """Do the same as `end_run`: a failed run needs no other cleanup."""
        self.end_run()

    def patience(self, nbytes: int) -> WaitLimit:
        """Return the limit on waiting for a copy of `nbytes`."""
        slice_seconds = self.host_link.expected_seconds(min(nbytes, lanes.SLICE_BYTES))
        stalled_seconds = max(_STALLED_S, _STALLED_SLICES * slice_seconds)
        whole_seconds = max(2 * stalled_seconds, _PATIENCE * self.host_link.expected_seconds(nbytes))
        return WaitLimit(whole_seconds, stalled_seconds, self._stalled)


@dataclasses.dataclass(frozen=True)
class _StagedSlice:
    """A slice whose copy from a staging buffer was started. It is valid if the buffer still holds the shard afterwards.

    `offset_bytes` is its offset in `source` and in the buffer; `target` is the range of the slot that it fills.
    """

    source: StagedSource
    held: Held
    offset_bytes: int
    target: torch.Tensor
    began: float


class StageAction(Action):
    """Copies from the staging buffers of all ranks, or from their shards in host memory.

    Bytes from buffers of other ranks take time on an emulated `link`, bytes directly from host memory on the host link.
    """

    def __init__(self, transport: StagedPull, stager: Stager, bank: int) -> None:
        self._transport, self._stager, self._bank = transport, stager, bank

    def fill(self, copy: SlotCopy, link: Link) -> None:
        """Copy all slices, from staging buffers where they hold them, and from host memory otherwise."""
        copy.check_bounds()
        # A buffer that holds the bytes now may be overwritten before the slot is free.
        copy.wait_for_slot()
        self._stager.reading(self._bank)
        try:
            self._copy_slices(copy, BusyLink(link))
        finally:
            self._stager.has_read(self._bank)

    def _copy_slices(self, copy: SlotCopy, peer_link: BusyLink) -> None:
        patience = self._transport.patience(sum(source.nbytes for source in copy.sources))
        unchecked: list[_StagedSlice] = []
        for source, offset, size, slot_offset in copy.lane.slices(copy.sources):
            assert isinstance(source, StagedSource), "with home hybrid every rank has staging buffers"
            assert source.staging is not None
            held, began = self._find(copy, source, offset, size, patience)
            if copy.abandoned.is_set():
                break
            target = copy.slot.narrow(0, slot_offset, size)
            if held is None:
                self._bring_from_host(copy, source, offset, target)
                continue
            copy.lane.bring(MemorySource(source.staging.memories[held.buffer], ()), offset, target)
            unchecked.append(_StagedSlice(source, held, offset, target, began))
            if copy.lane.is_synchronous:
                self._check(copy, unchecked, peer_link)
        self._check(copy, unchecked, peer_link)

    def _find(
        self, copy: SlotCopy, source: StagedSource, offset: int, size: int, patience: WaitLimit
    ) -> tuple[Held | None, float]:
        """Wait for bytes on their way into a buffer; return the buffer that holds them, and when it was found.

        Returns None for the buffer if the bytes must be fetched from host memory.
        """
        staging = source.staging
        assert staging is not None
        while True:
            began = time.perf_counter()
            state = staging.find_buffer(source.bank, offset, size)
            if isinstance(state, Held):
                return state, began
            if state is Found.ABSENT or not patience.waits_for(staging, staging.board.progress(), began):
                return None, began
            if copy.abandoned.wait(_PAUSE_S):
                return None, began
            patience.waited(time.perf_counter() - began)

    def _check(self, copy: SlotCopy, staged: list[_StagedSlice], peer_link: BusyLink) -> None:
        """Empty `staged`. Fetch slices from host memory if their staging buffer was overwritten before the copy."""
        if staged:
            copy.lane.wait_on_host(copy.lane.mark())
        for item in staged:
            assert item.source.staging is not None
            if not item.source.staging.still_holds(item.held):
                self._bring_from_host(copy, item.source, item.offset_bytes, item.target)
                continue
            copy.staged_bytes += item.target.numel()
            if item.source.over_link:
                peer_link.moved(item.target.numel(), item.began, copy.abandoned)
        staged.clear()

    def _bring_from_host(self, copy: SlotCopy, source: StagedSource, offset_bytes: int, target: torch.Tensor) -> None:
        began = time.perf_counter()
        copy.lane.bring(source, offset_bytes, target)
        copy.unstaged_bytes += target.numel()
        # A stream copies later, so that the time would say nothing about the link.
        if copy.lane.is_synchronous:
            self._transport.host_link.moved(target.numel(), began, copy.abandoned)
