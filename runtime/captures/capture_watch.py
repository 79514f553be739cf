"""Watch one call of a compiled model: which graph it ran, on which inputs, and what became of the results."""

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
    """What the backend made of `captured`; `top` calls the segments.

    `code` are the functions that Dynamo traced.
    """

    captured: GraphModule
    top: GraphModule
    segments: dict[str, SegmentRecord]
    executor: Executor
    code: tuple[CodeType, ...]


@dataclasses.dataclass(frozen=True)
class GraphRun:
    """The run of one graph: its inputs, and what it gave."""

    executor: Executor
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class CaptureWatch:
    """Collects what is compiled and run inside `watch_capture`; `problem` says why none of it can be stored.

    `tensors` are those of the model before the call: what a call assigns, Dynamo assigns after the graph has run.
    """

    def __init__(self, look: Callable[[], list[torch.Tensor]]) -> None:
        """`look` gives the tensors of the model, or raises NotStorableError."""
        self._look = look
        self.tensors: list[torch.Tensor] = []
        self.graphs: list[CompiledGraph] = []
        self.runs: list[GraphRun] = []
        self.problem = ""
        self._began = frames_compiled()

    def frames(self) -> tuple[int, int]:
        """How many functions Dynamo has begun to compile since the watch began, and how many it has compiled."""
        (began, compiled), (earlier_began, earlier_compiled) = frames_compiled(), self._began
        return began - earlier_began, compiled - earlier_compiled

    def watched(self, captured: GraphModule, top: GraphModule, executor: Executor) -> Callable[[list[Any]], Any]:
        """Wrap `executor` so that its runs are recorded.

        Call it while Dynamo captures, before the first run.
        """
        try:
            self.tensors = self.tensors or self._look()
            graph = CompiledGraph(captured, top, record_segments(top), executor, tuple(traced_code()))
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
def watch_capture(look: Callable[[], list[torch.Tensor]]) -> Iterator[CaptureWatch]:
    watch = CaptureWatch(look)
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)
