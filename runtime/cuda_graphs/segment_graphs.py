"""Record the segments of a graph when its shapes repeat, and replay them from then on.

Contract
    in    runs of a top-level graph, straight-line code that calls each segment at its places, one after the other
    out   the same results; segments run as they are in the first run of a shape, are recorded in the second, and
          replayed in later ones

A recording belongs to one shape of the graph and to the addresses of all fixed memory: parameters, shards, and the
ring's buffers in the order in which the run uses them. It has a CUDA graph for each recordable call.

Why memory of the pool is never reused too early. All recordings take memory of one pool, and only one run at a time
records or replays; a run begins on the device when the run before has ended there. Within a run, the outputs of
recorded calls are read by later code of the same run alone: what the graph returns is copied. While a run is recorded,
the pool gives a call no memory in which an earlier output lies that is still referenced. A replay runs the same
straight-line code, so each output has its last reader where it had it in the run that was recorded. Where a call does
not come as it was recorded, it and all later calls of this run are not replayed, and write no memory of the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moepass.runtime.cuda_graphs.graph_memory import GraphMemory
from moepass.runtime.cuda_graphs.recorded_call import NotRecordableError, RecordedCall, record_call
from moepass.runtime.system.tensor_memory import as_extent

# [Empirical] A recorded call costs host memory and time, so a graph whose sizes change all the time is not recorded for
# each of them. Not measured on a GPU.
MOST_SHAPES = 8
# Recordings of one shape: the ring's buffers come in as many orders as it has slots, mostly.
MOST_RECORDINGS_OF_A_SHAPE = 8
# Shapes that are remembered after their first run.
_MOST_REMEMBERED = 256

Segment = Callable[..., Any]
# Sizes of a graph's inputs, by name.
Shape = tuple[tuple[str, int], ...]


@dataclasses.dataclass
class GraphStatistics:
    """Runs by how they ran. `plain` are those without CUDA graphs, `stopped` replays that ended early, by reason."""

    recorded: int = 0
    replayed: int = 0
    plain: Counter[str] = dataclasses.field(default_factory=Counter)
    stopped: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class RecordedRun:
    """Recorded calls by place. `storages` are addresses of memory that is the same in every run of it."""

    storages: set[int]
    calls: dict[str, RecordedCall] = dataclasses.field(default_factory=dict)
    # Addresses of the pool's storages in which outputs of its calls lie.
    pooled: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class GraphedRun:
    """A run that records, or replays."""

    memory: GraphMemory
    recording: RecordedRun
    is_recording: bool
    stopped: str = ""

    def own(self, outputs: Any) -> Any:
        """The outputs of the graph, copied where they lie in the pool."""
        if not isinstance(outputs, (tuple, list)):
            return self._own(outputs)
        return type(outputs)(self._own(value) for value in outputs)

    def _own(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _storage_address(value) not in self.recording.pooled:
            return value
        extent = as_extent(value)
        fresh = torch.empty_like(extent)
        fresh.copy_(extent)
        return fresh.as_strided(value.shape, value.stride())


class _Here(threading.local):
    """The run of this thread."""

    run: GraphedRun | None = None


class SegmentGraphs:
    """The CUDA graphs of one top-level graph."""

    def __init__(self, refused: Collection[str], note_refusal: Callable[[str, str], None]) -> None:
        """`refused` are names of segments that are not recorded. `note_refusal` is told which one CUDA does not record,
        and why."""
        self.statistics = GraphStatistics()
        self._refused = set(refused)
        self._note_refusal = note_refusal
        self._lock = threading.Lock()
        self._here = _Here()
        self._memory: GraphMemory | None = None
        self._seen: dict[Shape, None] = {}
        self._recordings: dict[Shape, dict[tuple[int, ...], RecordedRun]] = {}

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers that inputs in other memory are copied to."""
        return 0 if self._memory is None else self._memory.staged_bytes

    def at(self, place: str, name: str, segment: Segment) -> Segment:
        """`segment`, called `name`, as it is called at `place` of the top-level graph."""

        def call(*inputs: Any) -> Any:
            run = self._here.run
            if run is None or run.stopped:
                return segment(*inputs)
            if run.is_recording:
                return self._record(run, place, name, segment, inputs)
            recorded = run.recording.calls.get(place)
            if recorded is None:
                return segment(*inputs)
            outputs = recorded.replay(inputs)
            if outputs is None:
                run.stopped = f"{place} came with other inputs than it was recorded with"
                return segment(*inputs)
            return outputs

        return call

    @contextlib.contextmanager
    def run(
        self, device: torch.device, sizes: Mapping[str, int], fixed: Sequence[torch.Tensor]
    ) -> Iterator[GraphedRun | None]:
        """A run of the graph on `device`, always the same; None where it runs without CUDA graphs.

        `fixed` is memory that rarely moves: parameters, shards, and the ring's buffers in the order in which the run
        uses them. The outputs must go through `own`.
        """
        if torch.cuda.is_current_stream_capturing():
            yield from self._plain("while the caller recorded a CUDA graph")
            return
        if not self._lock.acquire(blocking=False):
            yield from self._plain("while another run used the CUDA graphs")
            return
        try:
            shape = tuple(sorted(sizes.items()))
            addresses = _addresses(fixed)
            found = self._recordings.get(shape, {}).get(addresses)
            reason = None if found is not None else self._reason_not_to_record(shape)
            if reason is not None:
                yield from self._plain(reason)
                return
            if self._memory is None:
                self._memory = GraphMemory(device)
            recording = found or RecordedRun({_storage_address(value) for value in fixed})
            yield from self._with_graphs(self._memory, shape, addresses, recording)
        finally:
            self._lock.release()

    def _plain(self, reason: str) -> Iterator[None]:
        self.statistics.plain[reason] += 1
        before, self._here.run = self._here.run, None
        try:
            yield None
        finally:
            self._here.run = before

    def _with_graphs(
        self, memory: GraphMemory, shape: Shape, addresses: tuple[int, ...], recording: RecordedRun
    ) -> Iterator[GraphedRun]:
        of_shape = self._recordings.setdefault(shape, {})
        run = GraphedRun(memory, recording, is_recording=addresses not in of_shape)
        memory.begin_run()
        self._here.run = run
        try:
            yield run
            # Only now: a recording that an exception ended has calls that were not made.
            of_shape[addresses] = recording
        finally:
            self._here.run = None
            memory.end_run()
        if run.stopped:
            self.statistics.stopped[run.stopped] += 1
        elif run.is_recording:
            self.statistics.recorded += 1
        else:
            self.statistics.replayed += 1

    def _reason_not_to_record(self, shape: Shape) -> str | None:
        recorded = {known for known, found in self._recordings.items() if found}
        if shape not in recorded and shape not in self._seen:
            self._seen[shape] = None
            if len(self._seen) > _MOST_REMEMBERED:
                self._seen.pop(next(iter(self._seen)))
            return "in the first run of a shape"
        if shape not in recorded and len(recorded) >= MOST_SHAPES:
            return f"of other shapes than the {MOST_SHAPES} that are recorded"
        if len(self._recordings.get(shape, ())) >= MOST_RECORDINGS_OF_A_SHAPE:
            return f"of a shape that is recorded for {MOST_RECORDINGS_OF_A_SHAPE} places of its weights and slots"
        return None

    def _record(self, run: GraphedRun, place: str, name: str, segment: Segment, inputs: tuple[Any, ...]) -> Any:
        if name in self._refused:
            return segment(*inputs)
        recording = run.recording

        def is_fixed(value: torch.Tensor) -> bool:
            address = _storage_address(value)
            return address in recording.storages or address in recording.pooled

        try:
            call, outputs = record_call(run.memory, segment, inputs, is_fixed)
        except NotRecordableError as error:
            self._refused.add(name)
            self._note_refusal(name, f"CUDA does not record it: {error}")
            return segment(*inputs)
        recording.calls[place] = call
        given = {_storage_address(value) for value in inputs if isinstance(value, torch.Tensor)}
        of_outputs = {_storage_address(value) for value in outputs if isinstance(value, torch.Tensor)}
        recording.pooled |= of_outputs - given
        return outputs


def _addresses(fixed: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(value.data_ptr() for value in fixed)


def _storage_address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
