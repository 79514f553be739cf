"""Transport `pull` of home `hybrid`: shards are copied from staging buffers, or directly from host memory.

A rank waits for bytes on their way into a buffer while their copy makes progress, and in total little longer than
fetching the whole bank would take. Fetching them directly at once would add load to the host link, which is usually the
bottleneck. If no buffer holds the bytes, or the buffer was refilled during the copy, they are fetched from host memory
at once. So no rank depends on the speed of another one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence

import torch

from moepass.models.homes import PULL
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.runtime.homes.hybrid.stager import Found, Stager, StagingBuffers
from moepass.runtime.transfer import copying
from moepass.runtime.transfer.copying import PendingCopy, check_slot, slices_in_turn
from moepass.runtime.transfer.link import BusyLink, Link
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.transports import Transport

# [Empirical] The longest total wait of one copy for staging buffers, as a multiple of the time to fetch the whole bank
# from host memory. Fetching it directly would slow down this rank's copies into its staging buffers.
_PATIENCE = 1.5
# [Empirical] A rank is stalled if its buffers made no progress for the time of this many slices, and for longer than a
# thread waits for the interpreter lock. No copy waits for a stalled rank until it makes progress.
_STALLED_SLICES, _STALLED_S = 4, 0.005
_PAUSE_S = 0.0005


class Patience:
    """A limit on the time that one copy waits for bytes on their way. Times are those of `time.perf_counter`.

    Args:
        whole_seconds: the total waiting time.
        stalled_seconds: a rank without progress for this long is stalled; the copy does not wait for it.
        stalled: the progress of each stalled rank. It outlives the copy.
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
        self._stager: Stager | None = None
        self._stalled: dict[Hashable, int] = {}

    def connect(self, stager: Stager) -> None:
        """Start to fill this rank's staging buffers."""
        self._stager = stager

    def copy(self, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor) -> PendingCopy:
        """Return a copy of `bank` into `slot`."""
        if self._stager is None:
            return super().copy(bank, sources, slot)
        return StagedCopy(self, self._stager, bank, sources, slot)

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """Raise StagerError if the thread that fills this rank's staging buffers has failed."""
        if self._stager is not None:
            self._stager.check()
            self._stager.show_running(True)

    def end_run(self) -> None:
        """Show the other ranks that this rank is idle."""
        if self._stager is not None:
            self._stager.show_running(False)

    def fail(self, reason: str) -> None:
        """End the run, which failed."""
        self.end_run()

    def asked_for(self, bank: BankSpec) -> None:
        """Record that a copy of `bank` was requested. The stager learns the order of banks from these calls."""
        if self._stager is not None:
            self._stager.learn(bank.index)

    def patience(self, nbytes: int) -> Patience:
        """Return the limit on waiting for a copy of `nbytes`."""
        slice_seconds = self.host_link.expected_seconds(min(nbytes, copying.SLICE_BYTES))
        stalled_seconds = max(_STALLED_S, _STALLED_SLICES * slice_seconds)
        whole_seconds = max(2 * stalled_seconds, _PATIENCE * self.host_link.expected_seconds(nbytes))
        return Patience(whole_seconds, stalled_seconds, self._stalled)


class StagedCopy(PendingCopy):
    """A copy from the staging buffers of all ranks, or from their shards in host memory."""

    def __init__(
        self, transport: StagedPull, stager: Stager, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor
    ) -> None:
        super().__init__(sources, slot, bank.name)
        self._transport = transport
        self._stager = stager
        self._bank = bank.index

    def perform(self, link: Link) -> None:
        """Copy all slices, unless the copy is abandoned.

        Bytes from buffers of other ranks take time on `link`; bytes from host memory take time on the host link.
        """
        check_slot(self.sources, self.slot)
        for source in self.sources:
            source.check_bounds()
        self._stager.reading(self._bank)
        try:
            self._copy_slices(BusyLink(link))
        finally:
            self._stager.has_read(self._bank)

    def _copy_slices(self, peer_link: BusyLink) -> None:
        patience = self._transport.patience(sum(source.nbytes for source in self.sources))
        for source, offset, size, slot_offset in slices_in_turn(self.sources):
            if self.abandoned.is_set():
                return
            target = self.slot.data_ptr() + slot_offset
            assert isinstance(source, StagedSource), "with home hybrid every rank has staging buffers"
            began = self._copy_staged(source, offset, size, target, patience)
            if began is not None:
                self.staged_bytes += size
                if source.over_link:
                    peer_link.moved(size, began, self.abandoned)
                continue
            began = time.perf_counter()
            source.copy(offset, size, target)
            self.unstaged_bytes += size
            self._transport.host_link.moved(size, began, self.abandoned)

    def _copy_staged(
        self, source: StagedSource, offset: int, size: int, target: int, patience: Patience
    ) -> float | None:
        """Return when the copy from a buffer began (`time.perf_counter`), or None if no buffer had the bytes."""
        staging = source.staging
        assert staging is not None
        while True:
            began = time.perf_counter()
            result = staging.copy(source.bank, offset, size, target)
            if result is Found.COPIED:
                return began
            if result is Found.ABSENT or not patience.waits_for(staging, staging.board.progress(), began):
                return None
            if self.abandoned.wait(_PAUSE_S):
                return None
            patience.waited(time.perf_counter() - began)
