"""Records when segments, copies and waits happened, in the format of the simulator.

Without a recording, it costs one lookup of a context variable per segment and per acquire.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator
from typing import Protocol

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.timeline import Event, Timeline, timeline_of

# A time of `time.perf_counter`, or a timed event on a CUDA stream.
Moment = float | torch.cuda.Event


class RecordedCopy(Protocol):
    """A copy or decode that a timeline can show on `stream`, with the moments at which it began and ended."""

    label: str
    performed: tuple[Moment, Moment] | None

    @property
    def stream(self) -> str:
        """The name of its stream and of its operation: `copy` or `decode`."""

    def end(self) -> None:
        """Block until it has ended."""


def recorded_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return a timed event that happens when `stream` reaches this point."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def moment_on(device: torch.device) -> Moment:
    """Return a moment that passes when all work issued to the current stream of `device` so far is done."""
    return recorded_event(torch.cuda.current_stream(device)) if device.type == "cuda" else time.perf_counter()


def seconds_between(started: Moment, ended: Moment) -> float:
    """Return the seconds between two moments of one kind, which both have passed."""
    if isinstance(started, float) or isinstance(ended, float):
        assert isinstance(started, float)
        assert isinstance(ended, float)
        return ended - started
    return float(started.elapsed_time(ended)) / 1e3


class TimelineRecording:
    """The recording of a `record_timeline` block; `timeline` exists once the block has ended."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._spans: list[tuple[str, str, str, Moment, Moment]] = []
        self._copies: dict[int, RecordedCopy] = {}
        # The device of the runs, and one moment, as a time of the host and as an event of the device.
        self._clock: tuple[torch.device, float, torch.cuda.Event] | None = None
        self._is_emulated = False
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """The timeline; times count from the beginning of the block. Raises InputError inside the block."""
        if self._timeline is None:
            raise InputError("the timeline is complete once the block of record_timeline has been left; read it there")
        return self._timeline

    def begin_run(self, device: torch.device) -> None:
        """Prepare for a run on `device`, so that its events can be timed. Raises InputError if they cannot be."""
        if device.type == "cpu":
            return
        if device.type != "cuda":
            text = (
                f"record_timeline: the model computes on {device}, where times cannot be measured; timelines are "
                "recorded on devices cpu and cuda"
            )
            raise InputError(text, name="device", value=str(device), expected=("cpu", "cuda"))
        if self._clock is None:
            torch.cuda.synchronize(device)
            self._clock = device, time.perf_counter(), recorded_event(torch.cuda.current_stream(device))

    def add(self, op: str, layer: str, stream: str, started: Moment, ended: Moment) -> None:
        """Record that operation `op` of `layer` took from `started` to `ended`."""
        self._spans.append((op, layer, stream, started, ended))

    def add_copy(self, copy: RecordedCopy, is_emulated: bool) -> None:
        """Record a copy that was started, or waited for, inside the block."""
        self._copies[id(copy)] = copy
        self._is_emulated |= is_emulated

    def close(self) -> None:
        """Wait for the copies that fill slots for the next run, and make the timeline."""
        for copy in self._copies.values():
            copy.end()
        if self._clock is not None:
            torch.cuda.synchronize(self._clock[0])
        for copy in self._copies.values():
            if copy.performed is not None:
                self._spans.append((copy.stream, copy.label, copy.stream, *copy.performed))
        events = [
            Event(op, layer, stream, self._seconds(started), self._seconds(ended))
            for op, layer, stream, started, ended in self._spans
        ]
        self._timeline = timeline_of(events, "emulated" if self._is_emulated else "measured")
        self.forget()

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self._zero
        assert self._clock is not None, "begin_run must precede recording on a CUDA device"
        _, host_time, event = self._clock
        return host_time + seconds_between(event, moment) - self._zero

    def forget(self) -> None:
        """Drop all references to slots and banks."""
        self._copies.clear()
        self._spans.clear()


_recording: contextvars.ContextVar[TimelineRecording | None] = contextvars.ContextVar("recording", default=None)


def current_recording() -> TimelineRecording | None:
    """Return the innermost recording of this thread's context; None outside a recording."""
    return _recording.get()


@contextlib.contextmanager
def record_timeline() -> Iterator[TimelineRecording]:
    """Record every run of a compiled model that this thread makes inside the block, on a CPU or a CUDA device.

    After the block, `.timeline` of the recording has the segments and the waits for banks on stream `compute`, the
    transfers on stream `copy`, the decoding of encoded banks on stream `decode`, and the runs of graphs on stream
    `host`. On CUDA all but the last are timed by events on their streams. A run on another device raises InputError.
    """
    recording = TimelineRecording()
    token = _recording.set(recording)
    try:
        yield recording
    except BaseException:
        recording.forget()
        raise
    finally:
        _recording.reset(token)
    recording.close()
