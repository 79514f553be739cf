"""Small models of tokens, and what hybrid prefill makes of their graphs."""

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
    """`forward` of ids [batch, length], with weights that it may use; `width` numbers for each token."""

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
    """What the pass gives for the captured graph of `model`, after the passes before it."""
    names = [function.__name__ for function in PASSES]
    before = PASSES[: names.index("hybrid_prefill")]
    context = PassContext(chunk_tokens=chunk_tokens)
    result = run_passes(before, capture(model, ids, dynamic=dynamic).module, Plan(), context)
    return hybrid_prefill(result.module, result.plan, context)


def regions(module: GraphModule) -> dict[int, list[str]]:
    """The operators of each region, by its number."""
    found: dict[int, list[str]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and REGION_KEY in node.meta:
            found.setdefault(node.meta[REGION_KEY], []).append(str(node.target).removeprefix("aten."))
    return found


def compiled(
    model: nn.Module, ids: torch.Tensor, chunk_tokens: int, dynamic: bool | None = False, **options: Any
) -> tuple[Any, moepass.Compilation]:
    """What `model` gives, run so many tokens at a time."""
    given = {"lower": "eager", "chunk_tokens": chunk_tokens, **options}
    with torch.no_grad(), moepass.record_compilations() as compilations:
        found = torch.compile(model, backend="asyncep", dynamic=dynamic, options=given)(ids)
    return found, compilations[0]


def chunked(compilation: moepass.Compilation) -> int:
    """How many of the segments run some tokens at a time."""
    return sum(segment.lowering.chunk_tokens is not None for segment in compilation.plan.segments if segment.lowering)


def reasons(compilation: moepass.Compilation) -> str:
    """Why what does not run some tokens at a time runs them all at once."""
    found = [refusal.reason for refusal in compilation.plan.refusals]
    for segment in compilation.plan.segments:
        if segment.lowering and segment.lowering.refusal:
            found.append(segment.lowering.refusal.reason)
    return "; ".join(found)
