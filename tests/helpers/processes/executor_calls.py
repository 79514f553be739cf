"""Call the executors of compiled models without torch.compile around them, on an emulated CUDA."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

import moepass
from moepass.runtime.execute.executor import Executor
from moepass.runtime.execute.schedules import Schedule
from moepass.runtime.system.tensor_memory import MemoryTable


def compiled_executor(model: nn.Module, inputs: torch.Tensor) -> tuple[Executor, list[Any]]:
    """Return the executor of the compiled model, which has run once, and the arguments of that run."""
    calls: list[list[Any]] = []

    def call(executor: Executor, arguments: list[Any]) -> Any:
        calls.append(list(arguments))
        return run(executor, arguments)

    run = Executor.__call__
    with moepass.record_compilations() as compilations, mock.patch.object(Executor, "__call__", call):
        torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})(inputs)
    return compilations[0].executor, calls[0]


def forget_rings(executor: Executor) -> None:
    """Make the next call of `executor` look up its ring again."""
    schedules = executor._schedules
    schedules._schedules = MemoryTable()
    schedules.default = Schedule(executor.graph_module, None)
