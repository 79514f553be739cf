"""Transport `collective` on CUDA: banks are gathered from device memory into device memory, during the computation.

The copy thread agrees with the other ranks and issues the gather to the copy stream, behind the event "the slot is
free". The gather begins once this has happened on all ranks, so that no NCCL kernel occupies processors only to wait.
Then the thread waits until the gather has ended: a run passes its acquire when the bank is complete, and gets an error
if the gather failed.

Unmeasured: tests run this on emulated streams. It has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.homes.collective import CollectiveTransport, GatherPart, raise_peer_error
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import DeviceLinks, NcclLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.transfer.copy_lane import CopyLane, IssuedCopy
from moepass.runtime.transfer.copying import slices_for_stream
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.sources import Source


class IssuedGather(IssuedCopy):
    """A gather into device memory. Without a slot this rank sends, and receives nothing."""

    def __init__(self, part: GatherPart, slot: torch.Tensor | None, lane: CopyLane, after: object) -> None:
        super().__init__(part.sources, part.own.memory[:0] if slot is None else slot, part.label, lane, after)
        self.part = part
        self.wants = slot is not None

    def wait(self) -> None:
        """Block until the slot is full. Raises PeerError if the gather failed."""
        self.finished.wait()
        raise_peer_error(self.error)

    def issue(self) -> None:
        """Wait until the slot is free, and gather with the other ranks."""
        if isinstance(self.after, torch.cuda.Event):
            self.after.synchronize()
        self.part.gather(self.slot if self.wants else None, self._copy_own_part)

    def _copy_own_part(self) -> None:
        for source, offset, size, slot_offset in slices_for_stream([self.part.not_over_link]):
            self.lane.bring(source, offset, self.slot.narrow(0, slot_offset, size))


class DeviceCollectiveTransport(CollectiveTransport):
    """The collective transport into the memory of `device`, which has an index. `connect` connects the devices."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], DeviceLinks] = NcclLinks,
    ) -> None:
        super().__init__(link)
        self._device, self._connect = device, connect
        # The lane of gathers outside of a ring, created by the first of them.
        self._lane: CopyLane | None = None

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> GatherGroup:
        return DeviceGatherGroup(rendezvous, describe, self._device, self._connect)

    def issued_copy(
        self, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor, lane: CopyLane, after: object
    ) -> IssuedCopy:
        """Return the next gather of this run, into `slot`."""
        return IssuedGather(self._part_in_run(bank, sources), slot, lane, after)

    def _gather_at_once(self, part: GatherPart, memory: torch.Tensor | None) -> IssuedGather:
        self._lane = self._lane or CopyLane(torch.cuda.Stream(self._device, priority=-1))
        # The previous user of `memory` may still use it on the current stream.
        after = None if memory is None else recorded_event(torch.cuda.current_stream(self._device))
        return IssuedGather(part, memory, self._lane, after)
