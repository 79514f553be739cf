"""Watch one call of a compiled model: which graph it ran, on which inputs, and what became of the results."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from moepass.passes.graph.graph_records import NotStorableError
from moepass.runtime.captures.known_code import check_known, names_read
from moepass.runtime.execute.executor import Executor
from moepass.runtime.lowering.segment_records import SegmentRecord, record_segments
from moepass.runtime.torch_private import frames_compiled, traced_code

# Operators of libraries that are known by their versions.
_LIBRARIES = {"aten", "prim", "prims", "quantized", "mkldnn", "_c10d_functional", "inductor", "moepass", "transformers"}


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
        self._began = frames_compiled()

    def frames(self) -> tuple[int, int]:
        """How many functions Dynamo has begun to compile since the watch began, and how many it has compiled."""
        (began, compiled), (earlier_began, earlier_compiled) = frames_compiled(), self._began
        return began - earlier_began, compiled - earlier_compiled

    def check(self, graph: GraphModule) -> None:
        """`graph` is Dynamo's. What it calls as one function, AOT traces, and no list of sources has its code."""
        for node in graph.graph.nodes:
            target = node.target if node.op == "call_function" else None
            if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                library = str(target).partition(".")[0]
                if library not in _LIBRARIES:
                    self.problem = f"a call of the operator {target}, into which Dynamo does not look"
            if node.op == "call_module" and not isinstance(graph.get_submodule(node.target), GraphModule):
                self.problem = f"a call of the module {node.target}, into which Dynamo does not look"

    def watched(self, captured: GraphModule, top: GraphModule, executor: Executor) -> Callable[[list[Any]], Any]:
        """Wrap `executor` so that its runs are recorded.

        Call it while Dynamo captures, before the first run.
        """
        try:
            graph = CompiledGraph(captured, top, record_segments(top), executor, _traced_names())
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


def _traced_names() -> dict[str, frozenset[str]]:
    """The files whose code stands in the graph that is captured now, and the names that this code reads.

    Raises NotStorableError as `check_known`.
    """
    found: dict[str, frozenset[str]] = {}
    for code in traced_code():
        check_known(code, "a part of the model")
        if not code.co_filename.startswith("<"):  # as Python's own frozen modules, and what dataclasses write
            found[code.co_filename] = found.get(code.co_filename, frozenset()) | names_read(code)
    return found


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
