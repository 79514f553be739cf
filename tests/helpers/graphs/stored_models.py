"""Find out if a model is compiled, or loaded from an earlier process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from moepass.runtime.captures.capture_store import CaptureStore
from moepass.stored_compile import StoredModule

EAGER = {"lower": "eager"}


def graphs_compiled_by(call: Callable[[], Any]) -> int:
    """Return the number of graphs that Dynamo, after a reset, compiles in `call`."""
    torch._dynamo.reset()
    counters.clear()
    call()
    return int(counters["stats"]["unique_graphs"])


def compiles(store: CaptureStore, model: nn.Module, rows: torch.Tensor | None = None) -> bool:
    """Return True if a new process would compile `model`, and check that its result is that of `model`."""
    inputs = torch.ones(4) if rows is None else rows
    outputs: list[torch.Tensor] = []
    count = graphs_compiled_by(lambda: outputs.append(StoredModule(model, EAGER, "model", store)(inputs)))
    assert torch.equal(outputs[0], model(inputs))
    return count > 0
