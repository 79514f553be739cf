"""Small models over tokens, and the results of hybrid prefill for their graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers the fallback of grouped_mm
from torch import nn
from torch.fx import GraphModule

import moepass
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, run_passes
from moepass.passes.ir.segment import REGION_KEY
from moepass.passes.pipeline import PASSES
from moepass.passes.tokens.hybrid_prefill import hybrid_prefill
from tests.helpers.graphs.backend_helper import capture

EXPERTS, TOP_K, VOCABULARY = 4, 2, 11
Forward = Callable[["TokenModel", torch.Tensor], Any]


class TokenModel(nn.Module):
    """A model that calls `forward` with itself and ids [batch, length], and provides weights of size `width`."""

    def __init__(self, forward: Forward, batch: int, length: int, width: int) -> None:
        super().__init__()
        self.run = forward
        self.batch, self.length, self.width = batch, length, width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)
        self.of_position = nn.Parameter(torch.randn(length, width))
        self.of_sequence = nn.Parameter(torch.randn(batch, 1, width))
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.run(self, ids)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu())
        return result


def token_model(forward: Forward, batch: int = 3, length: int = 6, width: int = 8) -> tuple[TokenModel, torch.Tensor]:
    torch.manual_seed(0)
    return TokenModel(forward, batch, length, width), torch.randint(0, VOCABULARY, (batch, length))


def hybrid(model: nn.Module, ids: torch.Tensor, chunk_tokens: int = 4, dynamic: bool = False) -> PassResult:
    """Return the result of `hybrid_prefill` for the captured graph of `model`, after the passes before it."""
    names = [function.__name__ for function in PASSES]
    before = PASSES[: names.index("hybrid_prefill")]
    context = PassContext(chunk_tokens=chunk_tokens)
    result = run_passes(before, capture(model, ids, dynamic=dynamic).module, Plan(), context)
    return hybrid_prefill(result.module, result.plan, context)


def regions(module: GraphModule) -> dict[int, list[str]]:
    """Return the operators of each region, by the region's number."""
    operators: dict[int, list[str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and REGION_KEY in node.meta:
            operators.setdefault(node.meta[REGION_KEY], []).append(str(node.target).removeprefix("aten."))
    return operators


def compiled(
    model: nn.Module, ids: torch.Tensor, chunk_tokens: int, dynamic: bool | None = False, **options: Any
) -> tuple[Any, moepass.Compilation]:
    """Return the outputs of `model`, compiled with `chunk_tokens`, and the compilation."""
    settings = {"lower": "eager", "chunk_tokens": chunk_tokens, **options}
    with torch.no_grad(), moepass.record_compilations() as compilations:
        outputs = torch.compile(model, backend="asyncep", dynamic=dynamic, options=settings)(ids)
    return outputs, compilations[0]


def chunked(compilation: moepass.Compilation) -> int:
    """Count the segments that run in chunks of tokens."""
    return sum(segment.lowering.chunk_tokens is not None for segment in compilation.plan.segments if segment.lowering)


def reasons(compilation: moepass.Compilation) -> str:
    """Return the reasons why regions and segments do not run in chunks of tokens."""
    texts = [refusal.reason for refusal in compilation.plan.refusals]
    for segment in compilation.plan.segments:
        if segment.lowering and segment.lowering.refusal:
            texts.append(segment.lowering.refusal.reason)
    return "; ".join(texts)
