"""Whether a model is compiled, or runs as an earlier process has compiled it."""

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
    """By Dynamo, which knows nothing from before."""
    torch._dynamo.reset()
    counters.clear()
    call()
    return int(counters["stats"]["unique_graphs"])


def compiles(store: CaptureStore, model: nn.Module, rows: torch.Tensor | None = None) -> bool:
    """Whether a new process would compile `model`. The result is always that of the model at hand."""
    given = torch.ones(4) if rows is None else rows
    found: list[torch.Tensor] = []
    count = graphs_compiled_by(lambda: found.append(StoredModule(model, EAGER, "model", store)(given)))
    assert torch.equal(found[0], model(given))
    return count > 0
