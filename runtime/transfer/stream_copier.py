"""Copies on a CUDA stream of their own, into slots in device memory; events order them against the compute stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from moepass.passes.ir.timeline import COMPUTE
from moepass.runtime.transfer.copier import Copier, Decoder, RingStatistics, Wait
from moepass.runtime.transfer.copy_lane import IssuedCopy
from moepass.runtime.transfer.copying import check_slot, slices_for_stream
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.recording import current_recording, event_seconds, recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source


class StreamCopy:
    """A copy that was issued: its name, and the events around it on the copy stream."""

    def __init__(self, label: str, began: torch.cuda.Event, filled: torch.cuda.Event) -> None:
        self.label = label
        self.filled = filled
        self.performed = (began, filled)

    def end(self) -> None:
        """Block until the slot is full."""
        self.filled.synchronize()


def _recorded(copy: StreamCopy) -> StreamCopy:
    recording = current_recording()
    if recording is not None:
        recording.add_copy(copy, is_emulated=False)
    return copy


class StreamCopier(Copier):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Copies take copy engines, for which priorities mean nothing. Decoders, and copies inside of the device, take
        # processors: work of this stream goes first there, because it is short, and the link rests until it is done.
        self._stream = torch.cuda.Stream(device, priority=-1)
        # What copies read that may not be over yet, until the event: no one else may have that memory before.
        self._reading: deque[tuple[torch.cuda.Event, Sequence[Source]]] = deque()
        # When the compute stream came to a wait, and when it went on.
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def submit(self, fetch: Fetch, target: torch.Tensor, after: object) -> StreamCopy | IssuedCopy:
        check_slot(fetch.sources, target)
        for source in fetch.sources:
            source.check_bounds()
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            began = recorded_event(self._stream)
            for source, offset, size, place in slices_for_stream(fetch.sources):
                assert isinstance(source, MemorySource), "what else there is needs the host"
                target.narrow(0, place, size).copy_(source.memory.narrow(0, offset, size), non_blocking=True)
            copy = StreamCopy(fetch.bank.name, began, recorded_event(self._stream))
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        self._reading.append((copy.filled, fetch.sources))
        return _recorded(copy)

    def decode(
        self, copied: object, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor
    ) -> StreamCopy | IssuedCopy:
        assert isinstance(copied, StreamCopy)
        # Behind the copy, and in front of the next one, by the order of the stream.
        with torch.cuda.stream(self._stream):
            decoder(link, slot)
            return _recorded(StreamCopy(copied.label, copied.filled, recorded_event(self._stream)))

    def wait(self, filled: object, statistics: RingStatistics) -> Wait:
        assert isinstance(filled, (StreamCopy, IssuedCopy))
        self.settle(statistics)
        compute = torch.cuda.current_stream(self._device)
        came = recorded_event(compute)
        if isinstance(filled, IssuedCopy):
            filled.wait()
        compute.wait_event(filled.filled)
        went_on = recorded_event(compute)
        self._waits.append((came, went_on))
        recording = current_recording()
        if recording is not None:
            recording.add_copy(filled, is_emulated=False)
            recording.add("wait", filled.label, COMPUTE, came, went_on)
        return lambda: event_seconds(came, went_on)

    def event(self) -> torch.cuda.Event:
        return recorded_event(torch.cuda.current_stream(self._device))

    def abandon(self, filled: object) -> None:
        """A copy on a stream cannot be stopped; the next one into the same slot runs behind it."""

    def quiesce(self) -> None:
        # Whatever the streams are on which runs have read slots: an exception may have prevented a release.
        torch.cuda.synchronize(self._device)
        self._reading.clear()

    def close(self) -> None:
        self.quiesce()

    def settle(self, statistics: RingStatistics) -> None:
        """Waits that are over are added up; the host does not wait for the others."""
        while self._waits and self._waits[0][1].query():
            came, went_on = self._waits.popleft()
            statistics.waited_seconds += event_seconds(came, went_on)
