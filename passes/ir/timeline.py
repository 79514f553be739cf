"""Events by time and stream, in one format for simulated and recorded runs.

A stream does one thing at a time, so its events never overlap. The streams are:

    compute   op "segment": a segment of the graph; "wait": an acquire of a slot that is not yet full (exposed time)
    copy      op "copy": the transfer of a bank, into a slot if it is not encoded; each independent link is a separate
              stream
    decode    op "decode": the decoding of a transferred bank into its slot
    host      op "run": one run of a graph
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

COMPUTE, COPY, DECODE, HOST = "compute", "copy", "decode", "host"


@dataclasses.dataclass(frozen=True)
class Event:
    """`op` for `layer` on `stream`, between two times in seconds since the timeline's zero."""

    op: str
    layer: str
    stream: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Duration of the event."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events in the order of their starts. The times are "measured", "emulated" or "derived" (`source`).

    Zero is the start of the recording, or of the step that is shown. A copy for a step may start before zero or end
    after the last computation, because slots fill across the boundary of two runs.
    """

    events: tuple[Event, ...]
    source: str

    def on(self, stream: str) -> tuple[Event, ...]:
        """Return the events on `stream`."""
        return tuple(event for event in self.events if event.stream == stream)

    def seconds(self, op: str) -> float:
        """Return the total seconds of the events of one kind: `seconds("wait")` is the exposed time."""
        return sum(event.seconds for event in self.events if event.op == op)

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams with events: host, compute, decode, then the links by name."""
        rank = {HOST: 0, COMPUTE: 1, DECODE: 2}
        return tuple(sorted({event.stream for event in self.events}, key=lambda name: (rank.get(name, 3), name)))


def timeline_of(events: list[Event], source: str) -> Timeline:
    """Return a timeline of `events`, sorted by start."""
    return Timeline(tuple(sorted(events, key=lambda event: (event.start_seconds, event.end_seconds))), source)


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Return JSON in Chrome's trace event format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Each timeline is a process named by its key, and each stream a thread of it, so that a predicted and a measured run
    are shown one below the other.
    """
    trace: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items(), 1):
        trace.append(_named("process_name", process, 0, f"{name} ({timeline.source})"))
        for thread, stream in enumerate(timeline.streams, 1):
            trace.append(_named("thread_name", process, thread, stream))
            trace.append(
                {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
            )
            trace.extend(_slice(event, process, thread) for event in timeline.on(stream))
    return msgspec.json.encode({"traceEvents": trace, "displayTimeUnit": "ms"}).decode()


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(event: Event, process: int, thread: int) -> dict[str, object]:
    # Both ends are rounded before they are subtracted: if successive events overlapped by a nanosecond, a viewer would
    # draw the later event inside the earlier one.
    start_ns, end_ns = round(event.start_seconds * 1e9), round(event.end_seconds * 1e9)
    return {
        "ph": "X",
        "name": f"{event.op} {event.layer}".rstrip(),
        "cat": event.op,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {"op": event.op, "layer": event.layer},
    }
