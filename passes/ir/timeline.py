"""Events by time and stream: one format for a simulated run and for a recorded one.

A stream does one thing at a time, so its events never overlap. Streams are named by what they do:

    compute   op "segment", a segment of the graph; "wait", an acquire that found its slot not yet full (exposed time)
    copy      op "copy", a bank on its way into a slot; each link that works by itself is a stream of its own
    host      op "run", one run of a graph
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

COMPUTE, COPY, HOST = "compute", "copy", "host"


@dataclasses.dataclass(frozen=True)
class Event:
    """`op` on `stream`, for what in the model (`layer`), from when to when; seconds since the timeline's zero."""

    op: str
    layer: str
    stream: str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Events in the order of their starts. `source` is that of its times: "measured", "emulated" or "derived".

    Zero is where the recording began, or the step that is shown; a copy for a step may start before zero, or end behind
    the last computation, because slots fill across the boundary of two runs.
    """

    events: tuple[Event, ...]
    source: str

    def on(self, stream: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.stream == stream)

    def seconds(self, op: str) -> float:
        """Total seconds of the events of that kind: `seconds("wait")` is the exposed time."""
        return sum(event.seconds for event in self.events if event.op == op)

    @property
    def streams(self) -> tuple[str, ...]:
        """Host and compute first, then the links by name; only those on which something happened."""
        rank = {HOST: 0, COMPUTE: 1}
        return tuple(sorted({event.stream for event in self.events}, key=lambda name: (rank.get(name, 2), name)))


def timeline_of(events: list[Event], source: str) -> Timeline:
    return Timeline(tuple(sorted(events, key=lambda event: (event.start_seconds, event.end_seconds))), source)


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """JSON in Chrome's trace event format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Each timeline is a process called by its key, each stream a thread of it, so that a predicted run and a measured one
    lie one below the other.
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
    # Both ends are rounded before the difference is taken: successive events must not overlap by a nanosecond, or a
    # viewer draws the later one inside the earlier one.
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
