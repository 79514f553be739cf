"""A stand-in for the package torch_tensorrt, which cannot be imported without TensorRT's libraries.

It records its arguments and runs them with torch's own operators. It does not check what TensorRT can convert, or the
numbers of an engine. The calls are checked against the argument names of torch-tensorrt 2.13.0.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

# The arguments of `torch_tensorrt.dynamo.compile` that moepass passes.
_SETTINGS = {"device", "require_full_compilation", "min_block_size", "disable_tf32", "use_fp32_acc"}


@dataclasses.dataclass(frozen=True)
class Input:
    """`torch_tensorrt.Input` with a constant shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass
class Given:
    """The arguments of one call of `dynamo.compile`."""

    exported: ExportedProgram
    inputs: Sequence[Input]
    settings: dict[str, Any]


class StandInEngine(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = (run,)  # no submodule, because graphs do not show the contents of an engine

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._run[0](*inputs)


class StandIn(types.ModuleType):
    """A module for `sys.modules["torch_tensorrt"]`. `make` returns the compiled graph, by default one engine."""

    def __init__(self, make: Callable[[Given], GraphModule] | None = None) -> None:
        super().__init__("torch_tensorrt")
        self.given: list[Given] = []
        self.Input = Input
        self.dynamo = types.SimpleNamespace(compile=self._compile)
        self._make = make or in_one_engine

    def _compile(self, exported: ExportedProgram, *, arg_inputs: Sequence[Input], **settings: Any) -> GraphModule:
        assert isinstance(exported, ExportedProgram)
        assert settings.keys() == _SETTINGS
        assert settings["require_full_compilation"]
        self.given.append(Given(exported, arg_inputs, settings))
        return self._make(self.given[-1])


def in_one_engine(given: Given, run: Callable[..., Any] | None = None) -> GraphModule:
    """Return the graph of a full conversion: it calls one engine, which runs the exported program or `run`."""
    graph = Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(len(given.inputs))]
    graph.output(graph.call_module("_run_on_acc_0", tuple(inputs)))
    return GraphModule({"_run_on_acc_0": StandInEngine(run or given.exported.module())}, graph)
