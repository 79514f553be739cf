"""Watch one call of a compiled model: the graphs that it compiled and ran, with their inputs and outputs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.segment_records import SegmentRecord, record_segments
from moepass.runtime.torch_private import frames_compiled, traced_code


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph that the backend compiled; `code` has the functions that Dynamo traced."""

    captured: GraphModule
    top: GraphModule
    segments: dict[str, SegmentRecord]
    executor: Executor
    code: tuple[CodeType, ...]


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """The run of one graph, with its inputs and outputs."""

    executor: Executor
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class CaptureWatch:
    """Collects the graphs that are compiled and run inside `watch_capture`; `problem` says why none can be stored."""

    def __init__(self, read_tensors: Callable[[], list[torch.Tensor]]) -> None:
        self._read_tensors = read_tensors
        # The model's tensors before the call: Dynamo assigns attributes only after the graph has run.
        self.tensors: list[torch.Tensor] = []
        self.graphs: list[CompiledGraph] = []
        self.runs: list[GraphRun] = []
        self.problem = ""
        self._began = frames_compiled()

    def frames(self) -> tuple[int, int]:
        """Return how many functions Dynamo began to compile since the watch began, and how many it finished."""
        (began, compiled), (earlier_began, earlier_compiled) = frames_compiled(), self._began
        return began - earlier_began, compiled - earlier_compiled

    def watched(self, captured: GraphModule, top: GraphModule, executor: Executor) -> Callable[[list[Any]], Any]:
        """Wrap `executor` so that its runs are recorded. Call it while Dynamo captures, before the first run."""
        try:
            self.tensors = self.tensors or self._read_tensors()
            self.graphs.append(CompiledGraph(captured, top, record_segments(top), executor, tuple(traced_code())))
        except NotStorableError as error:
            self.problem = str(error)

        def run(inputs: list[Any]) -> Any:
            watch = current_watch()
            if watch is None:
                return executor(inputs)
            arguments = tuple(inputs)  # the executor empties the list
            outputs: Sequence[Any] = executor(inputs)
            watch.runs.append(GraphRun(executor, arguments, tuple(outputs)))
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


_current: contextvars.ContextVar[CaptureWatch | None] = contextvars.ContextVar("watch", default=None)


def current_watch() -> CaptureWatch | None:
    """Return the watch of the enclosing `watch_capture`, if any."""
    return _current.get()


@contextlib.contextmanager
def watch_capture(read_tensors: Callable[[], list[torch.Tensor]]) -> Iterator[CaptureWatch]:
    """Watch the call inside. `read_tensors` returns the tensors of the model, or raises NotStorableError."""
    watch = CaptureWatch(read_tensors)
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)
