"""The way into slots on a GPU for copies that need the host: a copy thread issues them to a copy stream.

What lies in no memory that the device can read comes through bounce buffers: pinned memory, from which it goes on while
the next bytes are read into another one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import torch

from moepass.passes.machine.times import SLICE_BYTES
from moepass.runtime.transfer.copier import Decoder
from moepass.runtime.transfer.copying import PendingCopy, check_slot, slices_for_stream, slices_in_turn
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.streams import pinned_memory

# Two overlap a read with the copy of the bytes before; with a third one the thread reads on where that copy is late.
_BOUNCE_BUFFERS = 3


@dataclasses.dataclass
class BounceBuffer:
    """Pinned memory; `emptied` has happened once nothing reads it any more, None: nothing ever did."""

    memory: torch.Tensor
    emptied: torch.cuda.Event | None = None


class CopyLane:
    """The copy stream of a ring, as its copy thread uses it. Belongs to that thread alone."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._bounce: deque[BounceBuffer] = deque()
        # Memory that copies use which may not be over yet, until the event.
        self._in_use: deque[tuple[torch.cuda.Event, object]] = deque()

    def bring(self, source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        """Issue the copy of the bytes of `source` from there on into `target`, flat uint8."""
        if isinstance(source, MemorySource):
            target.copy_(source.memory.narrow(0, offset_bytes, target.numel()), non_blocking=True)
            return
        buffer = self._empty_buffer()
        source.copy(offset_bytes, target.numel(), buffer.memory.data_ptr())
        target.copy_(buffer.memory[: target.numel()], non_blocking=True)
        buffer.emptied = recorded_event(self.stream)

    def _empty_buffer(self) -> BounceBuffer:
        if len(self._bounce) < _BOUNCE_BUFFERS:
            self._bounce.append(BounceBuffer(pinned_memory(SLICE_BYTES)))
        else:
            self._bounce.rotate(-1)
        buffer = self._bounce[-1]
        if buffer.emptied is not None:
            buffer.emptied.synchronize()
        return buffer

    def keep(self, until: torch.cuda.Event, memory: object) -> None:
        """Keep `memory`, which copies use, until the event `until`."""
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()
        self._in_use.append((until, memory))

    def __del__(self) -> None:
        # Before the bounce buffers and all that is kept go.
        self.stream.synchronize()


class IssuedCopy(PendingCopy):
    """A copy that the copy thread issues: `finished` is set then, and `filled` happens when the slot is full."""

    filled: torch.cuda.Event

    def __init__(
        self, sources: Sequence[Source], slot: torch.Tensor, label: str, lane: CopyLane, after: object
    ) -> None:
        """It begins once the event `after` has happened; None: at once."""
        super().__init__(sources, slot, label)
        self.lane = lane
        self.after = after

    def end(self) -> None:
        super().end()
        self.filled.synchronize()

    def perform(self, link: Link) -> None:
        stream = self.lane.stream
        with torch.cuda.stream(stream):
            if isinstance(self.after, torch.cuda.Event):
                stream.wait_event(self.after)
            began = recorded_event(stream)
            try:
                self.issue()
            finally:
                self.filled = recorded_event(stream)
                self.performed = (began, self.filled)
                self.lane.keep(self.filled, (self.sources, self.slot))

    def issue(self) -> None:
        """Issue everything that fills the slot, unless the copy is abandoned. The lane's stream is the current one."""
        check_slot(self.sources, self.slot)
        for source in self.sources:
            source.check_bounds()
        is_in_memory = all(isinstance(source, MemorySource) for source in self.sources)
        for source, offset, size, place in (slices_for_stream if is_in_memory else slices_in_turn)(self.sources):
            if self.abandoned.is_set():
                return
            self.lane.bring(source, offset, self.slot.narrow(0, place, size))


class IssuedDecode(IssuedCopy):
    """The decode behind a copy: whoever waits for it has waited for both."""

    def __init__(self, copied: IssuedCopy, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor) -> None:
        super().__init__((), slot, copied.label, copied.lane, None)
        self._copied = copied
        self._decoder = decoder
        self._link = link

    def abandon(self) -> None:
        self._copied.abandon()
        super().abandon()

    def issue(self) -> None:
        self._copied.wait()
        if not self.abandoned.is_set():
            self._decoder(self._link, self.slot)
