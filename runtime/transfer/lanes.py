"""Lanes, and the slices in which they copy: on a CPU the calling thread does the work itself; on CUDA a stream does."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moepass.passes.machine.times import SLICE_BYTES as SLICE_BYTES
from moepass.passes.machine.times import stream_slice_bytes
from moepass.runtime.system.pinned_memory import pinned_memory
from moepass.runtime.transfer.recording import Moment, recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source

# Two buffers overlap a read with the copy of the bytes before; a third lets the thread read on if that copy is late.
_BOUNCE_BUFFERS = 3


# A source, an offset in it, a number of bytes, and the offset in the slot that they go to.
Slice = tuple[Source, int, int, int]


def round_robin_slices(sources: Sequence[Source], slice_bytes: int | None = None) -> Iterator[Slice]:
    """Yield slices of each source in turn, of at most `slice_bytes`, so that all sources are read at the same time."""
    step = slice_bytes or SLICE_BYTES

    def slices(source: Source) -> Iterator[Slice]:
        for piece in source.pieces:
            for start in range(0, piece.nbytes, step):
                size = min(step, piece.nbytes - start)
                yield source, piece.source_offset_bytes + start, size, piece.slot_offset_bytes + start

    for slices_of_all in itertools.zip_longest(*map(slices, sources)):
        yield from (item for item in slices_of_all if item is not None)


def stream_slices(sources: Sequence[Source]) -> Iterator[Slice]:
    """Yield slices like `round_robin_slices`, few enough that issuing them does not delay the host's kernel launches.

    A single source is not cut: no second source alternates with it, and a copy on a stream cannot be abandoned.
    """
    nbytes = sum(source.nbytes for source in sources)
    nonempty = sum(1 for source in sources if source.pieces)
    return round_robin_slices(sources, stream_slice_bytes(nbytes) if nonempty > 1 else max(1, nbytes))


def finish_on(device: torch.device) -> None:
    """Block until all work issued to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Lane:
    """The lane of a CPU: the calling thread does all work, so moments are times of `time.perf_counter`."""

    # Whether work is done when the call that asks for it returns.
    is_synchronous = True

    def slices(self, sources: Sequence[Source]) -> Iterator[Slice]:
        """Return the slices of a copy from `sources`, in the order in which this lane copies them."""
        return round_robin_slices(sources)

    def bring(self, source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        """Copy the bytes of `source` from the offset on into `target`, flat uint8, and fill all of it."""
        source.copy(offset_bytes, target.numel(), target.data_ptr())

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operators of torch run on this lane."""
        return contextlib.nullcontext()

    def another(self) -> Lane:
        """Return a lane to the same device, whose work does not wait for the work of this one."""
        return self

    def begin(self, *after: object) -> Moment:
        """Delay the work that follows until the moments `after`; return a moment that passes when this work begins."""
        return time.perf_counter()

    def mark(self) -> Moment:
        """Return a moment that passes when the work given to this lane so far is done."""
        return time.perf_counter()

    def keep(self, until: Moment, memory: object) -> None:
        """Hold a reference to `memory`, which the lane's work uses, until the moment `until`."""

    def wait_on_host(self, until: object) -> None:
        """Block the calling thread until the moment `until`."""

    def mark_computation(self) -> Moment:
        """Return a moment that passes when the computation issued so far is done."""
        return time.perf_counter()

    def delay_computation(self, until: Moment) -> None:
        """Delay all computation that is issued from now on until the moment `until`."""

    def has_passed(self, moment: Moment) -> bool:
        """Return whether `moment` has passed, without waiting for it."""
        return True

    def synchronize(self) -> None:
        """Block until no work that was issued so far, by copies or by the computation, uses a slot."""


HOST_LANE = Lane()


@dataclasses.dataclass
class BounceBuffer:
    """Pinned memory through which bytes pass that the device cannot read.

    `emptied` is the event after the last copy out of the buffer; None if there was no copy yet.
    """

    memory: torch.Tensor
    emptied: torch.cuda.Event | None = None


class StreamLane(Lane):
    """A stream of `device` for copies or for decodes, with moments that are CUDA events.

    One thread at a time may give work to a lane. Bytes that the device cannot read pass through bounce buffers.
    """

    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Copies between host and device run on copy engines, which ignore priorities. Decoders and copies inside the
        # device run on SMs: they are short, and later copies wait for them, so they go first.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._bounce: deque[BounceBuffer] = deque()
        # Memory in use by copies that may not be done yet, with the event after which it is free.
        self._in_use: deque[tuple[Moment, object]] = deque()
        self._pruning = threading.Lock()

    def slices(self, sources: Sequence[Source]) -> Iterator[Slice]:
        """Return slices that each fit into a bounce buffer, or larger slices if the device can read all sources."""
        is_in_memory = all(isinstance(source, MemorySource) for source in sources)
        return stream_slices(sources) if is_in_memory else round_robin_slices(sources)

    def bring(self, source: Source, offset_bytes: int, target: torch.Tensor) -> None:
        """Issue the copy of the bytes; a file is read into a bounce buffer first."""
        if isinstance(source, MemorySource):
            target.copy_(source.memory.narrow(0, offset_bytes, target.numel()), non_blocking=True)
            return
        buffer = self._empty_buffer()
        source.copy(offset_bytes, target.numel(), buffer.memory.data_ptr())
        target.copy_(buffer.memory[: target.numel()], non_blocking=True)
        buffer.emptied = recorded_event(self.stream)

    def _empty_buffer(self) -> BounceBuffer:
        if len(self._bounce) < _BOUNCE_BUFFERS:
            self._bounce.append(BounceBuffer(pinned_memory(SLICE_BYTES, self._device)))
        else:
            self._bounce.rotate(-1)
        buffer = self._bounce[-1]
        if buffer.emptied is not None:
            buffer.emptied.synchronize()
        return buffer

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the lane's stream is the current one."""
        return torch.cuda.stream(self.stream)

    def another(self) -> StreamLane:
        """Return a lane with another stream of the device."""
        return StreamLane(self._device)

    def begin(self, *after: object) -> Moment:
        """Make the stream wait for the events among `after`; return an event on the stream."""
        for event in after:
            if isinstance(event, torch.cuda.Event):
                self.stream.wait_event(event)
        return recorded_event(self.stream)

    def mark(self) -> Moment:
        """Return an event behind all work issued to the stream so far."""
        return recorded_event(self.stream)

    def keep(self, until: Moment, memory: object) -> None:
        """Hold a reference to `memory` until the event `until` has happened."""
        self._in_use.append((until, memory))
        self._prune()

    def _prune(self) -> None:
        # A finalizer may call this in the middle of this very loop, so it must not wait for the lock.
        if not self._pruning.acquire(blocking=False):
            return
        try:
            while self._in_use and self.has_passed(self._in_use[0][0]):
                self._in_use.popleft()
        finally:
            self._pruning.release()

    def wait_on_host(self, until: object) -> None:
        """Block the calling thread until the event `until` has happened; return at once if it is not an event."""
        if isinstance(until, torch.cuda.Event):
            until.synchronize()

    def mark_computation(self) -> Moment:
        """Return an event behind all work issued to the current stream so far."""
        return recorded_event(torch.cuda.current_stream(self._device))

    def delay_computation(self, until: Moment) -> None:
        """Make the current stream wait for the event `until`."""
        assert isinstance(until, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(until)

    def has_passed(self, moment: Moment) -> bool:
        """Return whether the event has happened."""
        return isinstance(moment, float) or bool(moment.query())

    def synchronize(self) -> None:
        """Block until all streams of the device are idle, and drop the memory that copies no longer use."""
        # All streams of the device: an exception may have prevented the release of slots that any of them reads.
        torch.cuda.synchronize(self._device)
        self._prune()

    def __del__(self) -> None:
        # The bounce buffers and the memory in use are freed after this.
        if hasattr(self, "stream"):
            self.stream.synchronize()
