"""Records the segments of a graph when its shapes repeat, and replays them from then on.

Contract
    in    runs of a top-level graph, straight-line code that calls segments one after the other
    out   the same results. Segments run eagerly in the first run of a shape, are recorded in the second, and are
          replayed in later ones

A recording belongs to one shape of the graph and to the addresses of all fixed memory: parameters, shards, and the
ring's buffers in the order in which the run uses them. It has a CUDA graph for each recordable call.

Memory of the pool is never reused too early, for these reasons. All recordings share one pool, and only one run at a
time records or replays; on the device, a run begins after the last run has ended. Within a run, only later code of the
same run reads the outputs of recorded calls, because the outputs of the whole graph are copied. During a recording, the
pool gives a call no memory of an earlier output that is still referenced. A replay runs the same straight-line code, so
each output has its last reader at the same point as in the recording. If a call gets other inputs than it was recorded
with, neither this call nor a later one of the run is replayed, so none of them writes memory of the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moepass.runtime.cuda_graphs.recorded_call import GraphMemory, NotRecordableError, RecordedCall, record_call
from moepass.runtime.system.tensor_memory import as_extent

# [Empirical] The most shapes that are recorded: a recorded call costs host memory and time. Not measured on a GPU.
MOST_SHAPES = 8
# The most recordings of one shape. The ring usually uses its buffers in as many orders as it has slots.
MOST_RECORDINGS_OF_A_SHAPE = 8
# The most shapes that are remembered after their first run.
_MOST_REMEMBERED = 256

Segment = Callable[..., Any]
# Sizes of a graph's inputs, by name.
Shape = tuple[tuple[str, int], ...]


@dataclasses.dataclass
class GraphStatistics:
    """The number of runs by how they ran: `plain` without CUDA graphs and `stopped` early in a replay, by reason."""

    recorded: int = 0
    replayed: int = 0
    plain: Counter[str] = dataclasses.field(default_factory=Counter)
    stopped: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class RecordedRun:
    """The recorded calls of a run by call site, with the addresses of the fixed memory (`storages`).

    `pooled` has the addresses of the pool's storages that hold outputs of these calls.
    """

    storages: set[int]
    calls: dict[str, RecordedCall] = dataclasses.field(default_factory=dict)
    pooled: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class GraphedRun:
    """A run that records or replays. `stopped` says why a replay ended early."""

    memory: GraphMemory
    recording: RecordedRun
    is_recording: bool
    stopped: str = ""

    def own(self, outputs: Any) -> Any:
        """Return the outputs of the graph; outputs in memory of the pool are copied."""
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


class _CurrentRun(threading.local):
    # Each thread has its own run.
    run: GraphedRun | None = None


class SegmentGraphs:
    """The CUDA graphs of one top-level graph, without segments named in `refused`.

    `note_refusal` is called with the name of a segment that CUDA cannot record, and the reason.
    """

    def __init__(self, refused: Collection[str], note_refusal: Callable[[str, str], None]) -> None:
        self.statistics = GraphStatistics()
        self._refused = set(refused)
        self._note_refusal = note_refusal
        self._lock = threading.Lock()
        self._current = _CurrentRun()
        self._memory: GraphMemory | None = None
        self._seen: dict[Shape, None] = {}
        self._recordings: dict[Shape, dict[tuple[int, ...], RecordedRun]] = {}

    def at(self, site: str, name: str, segment: Segment) -> Segment:
        """Return a function that runs, records or replays `segment`, called `name`, at call site `site`."""

        def call(*inputs: Any) -> Any:
            run = self._current.run
            if run is None or run.stopped:
                return segment(*inputs)
            if run.is_recording:
                return self._record(run, site, name, segment, inputs)
            recorded = run.recording.calls.get(site)
            if recorded is None:
                return segment(*inputs)
            outputs = recorded.replay(inputs)
            if outputs is None:
                run.stopped = f"{site} got other inputs than it was recorded with"
                return segment(*inputs)
            return outputs

        return call

    @contextlib.contextmanager
    def run(
        self, device: torch.device, sizes: Mapping[str, int], fixed: Sequence[torch.Tensor]
    ) -> Iterator[GraphedRun | None]:
        """Enter a run of the graph; yield None if it uses no CUDA graphs.

        The outputs of the graph must pass through `GraphedRun.own`. All runs have the same `device`. `sizes` are the
        sizes of the graph's inputs. The address of `fixed` memory rarely changes: parameters, shards, and the ring's
        buffers in the order in which the run uses them.
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
            earlier = self._recordings.get(shape, {}).get(addresses)
            reason = None if earlier is not None else self._reason_not_to_record(shape)
            if reason is not None:
                yield from self._plain(reason)
                return
            if self._memory is None:
                self._memory = GraphMemory(device)
            recording = earlier or RecordedRun({_storage_address(value) for value in fixed})
            yield from self._with_graphs(self._memory, shape, addresses, recording)
        finally:
            self._lock.release()

    def _plain(self, reason: str) -> Iterator[None]:
        self.statistics.plain[reason] += 1
        outer, self._current.run = self._current.run, None
        try:
            yield None
        finally:
            self._current.run = outer

    def _with_graphs(
        self, memory: GraphMemory, shape: Shape, addresses: tuple[int, ...], recording: RecordedRun
    ) -> Iterator[GraphedRun]:
        of_shape = self._recordings.setdefault(shape, {})
        run = GraphedRun(memory, recording, is_recording=addresses not in of_shape)
        memory.begin_run()
        self._current.run = run
        try:
            yield run
            # A recording that was ended by an exception lacks calls, so it is stored only here.
            of_shape[addresses] = recording
        finally:
            self._current.run = None
            memory.end_run()
        if run.stopped:
            self.statistics.stopped[run.stopped] += 1
        elif run.is_recording:
            self.statistics.recorded += 1
        else:
            self.statistics.replayed += 1

    def _reason_not_to_record(self, shape: Shape) -> str | None:
        recorded = {recorded_shape for recorded_shape, runs in self._recordings.items() if runs}
        if shape not in recorded and shape not in self._seen:
            self._seen[shape] = None
            if len(self._seen) > _MOST_REMEMBERED:
                self._seen.pop(next(iter(self._seen)))
            return "in the first run of a shape"
        if shape not in recorded and len(recorded) >= MOST_SHAPES:
            return f"of a new shape, after {MOST_SHAPES} shapes were recorded"
        if len(self._recordings.get(shape, ())) >= MOST_RECORDINGS_OF_A_SHAPE:
            return f"of a shape that is recorded for {MOST_RECORDINGS_OF_A_SHAPE} addresses of its weights and slots"
        return None

    def _record(self, run: GraphedRun, site: str, name: str, segment: Segment, inputs: tuple[Any, ...]) -> Any:
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
        recording.calls[site] = call
        of_inputs = {_storage_address(value) for value in inputs if isinstance(value, torch.Tensor)}
        of_outputs = {_storage_address(value) for value in outputs if isinstance(value, torch.Tensor)}
        recording.pooled |= of_outputs - of_inputs
        return outputs


def _addresses(fixed: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(value.data_ptr() for value in fixed)


def _storage_address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
