"""Watch one call of a compiled model: which graph it ran, on which inputs, and what became of the results."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.segment_records import SegmentRecord, record_segments
from moepass.runtime.torch_private import traced_names


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """What the backend made of `captured`; `top` calls the segments.

    `names` has the sources that Dynamo traced, and the names that they read.
    """

    captured: GraphModule
    top: GraphModule
    segments: dict[str, SegmentRecord]
    executor: Executor
    names: Mapping[str, frozenset[str]]


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """The run of one graph: its inputs, and what it gave."""

    executor: Executor
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class CaptureWatch:
    """Collects what is compiled and run inside `watch_capture`; `problem` says why none of it can be stored."""

    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []
        self.runs: list[GraphRun] = []
        self.problem = ""

    def watched(self, captured: GraphModule, top: GraphModule, executor: Executor) -> Callable[[list[Any]], Any]:
        """Wrap `executor` so that its runs are recorded. To be called while Dynamo captures, and before the first run."""
        try:
            graph = CompiledGraph(captured, top, record_segments(top), executor, traced_names())
            self.graphs.append(graph)
        except NotStorableError as error:
            self.problem = str(error)
        return _Watched(executor)


class _Watched:
    _boxed_call = True

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __call__(self, inputs: list[Any]) -> Any:
        watch = current_watch()
        if watch is None:
            return self._executor(inputs)
        given = tuple(inputs)
        outputs: Sequence[Any] = self._executor(inputs)
        watch.runs.append(GraphRun(self._executor, given, tuple(outputs)))
        return outputs


_current: contextvars.ContextVar[CaptureWatch | None] = contextvars.ContextVar("watch", default=None)


def current_watch() -> CaptureWatch | None:
    return _current.get()


@contextlib.contextmanager
def watch_capture() -> Iterator[CaptureWatch]:
    watch = CaptureWatch()
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)
