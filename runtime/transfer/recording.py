"""Record when segments, copies and waits really happened, in the format that the simulator uses.

Off, it costs one look at a context variable per segment and per acquire.
"""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

from moepass.models.errors import InputError
from moepass.passes.ir.timeline import COPY, Event, Timeline, timeline_of
from moepass.runtime.transfer.copying import PendingCopy


class TimelineRecording:
    """What happens inside a block of `record_timeline`; `timeline` is there once the block has been left."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._events: list[Event] = []
        self._copies: dict[int, PendingCopy] = {}
        self._is_emulated = False
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Times count from the beginning of the block. Raises InputError inside the block."""
        if self._timeline is None:
            raise InputError("the timeline is complete once the block of record_timeline has been left; read it there")
        return self._timeline

    def add(self, op: str, layer: str, stream: str, started: float) -> None:
        """An event that ends now; `started` is of `time.perf_counter`."""
        self._events.append(Event(op, layer, stream, started - self._zero, time.perf_counter() - self._zero))

    def add_copy(self, copy: PendingCopy, is_emulated: bool) -> None:
        """A copy that was started, or waited for, inside the block."""
        self._copies[id(copy)] = copy
        self._is_emulated |= is_emulated

    def close(self) -> None:
        """Wait for the copies that fill slots ahead of the next run, and sort everything into a timeline."""
        for copy in self._copies.values():
            copy.end()
        copies = [
            Event("copy", copy.label, COPY, *(moment - self._zero for moment in copy.performed))
            for copy in self._copies.values()
            if copy.performed is not None
        ]
        self._timeline = timeline_of(self._events + copies, "emulated" if self._is_emulated else "measured")
        self.forget()

    def forget(self) -> None:
        """Drop what keeps slots and banks alive."""
        self._copies.clear()
        self._events.clear()


_recording: contextvars.ContextVar[TimelineRecording | None] = contextvars.ContextVar("recording", default=None)


def current_recording() -> TimelineRecording | None:
    """The innermost recording that this thread is in."""
    return _recording.get()


@contextlib.contextmanager
def record_timeline() -> Iterator[TimelineRecording]:
    """Record every run of a compiled model that this thread makes inside the block, on device cpu.

    `.timeline` of what is given, read after the block, holds the segments and the waits for banks on stream `compute`,
    the transfers on stream `copy`, and the runs of graphs on stream `host`. A run on another device raises InputError.
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
