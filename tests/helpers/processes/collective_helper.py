"""Models with the transport `collective`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import moepass
from tests.helpers.graphs.backend_helper import Stack
from tests.helpers.models.moe_stack import StackConfig, build_stack

SMALL = StackConfig(layers=2)


def compiled_model(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True, **options})


def bias_stack(form: str = "dense_bmm", depth: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(form, depth=depth, bias=True)


def offload_collective(model: nn.Module, timeout_s: float = 50, **arguments: Any) -> moepass.OffloadReport:
    return moepass.offload_experts(model, moepass.Peer(transport="collective", timeout_s=timeout_s), **arguments)


def adopted_model(config: StackConfig, **options: Any) -> Callable[..., Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    return compiled_model(build_stack(config, "all_to_all"), **{"transport": "collective", "timeout_s": 50, **options})


def hidden_states(config: StackConfig, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, config.hidden, generator=torch.Generator().manual_seed(seed)).to(config.dtype)
