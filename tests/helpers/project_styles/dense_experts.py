"""Experts on one device that each compute every token, as several projects write them; a router chooses some of them.

Results of experts that a token has not chosen are multiplied by zero. A module `Layer()` maps hidden states
[tokens, HIDDEN] to [tokens, HIDDEN].
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 4, 2


class DenseExperts(nn.Module):
    """A router, and the weights of all experts in the layout of their products, with or without biases."""

    has_bias = False

    def __init__(self, hidden: int = HIDDEN, width: int = WIDTH, experts: int = EXPERTS, top_k: int = TOP_K) -> None:
        super().__init__()
        self.hidden, self.width, self.experts, self.top_k = hidden, width, experts, top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * width) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        if self.has_bias:
            self.up_bias = nn.Parameter(torch.randn(experts, 2 * width))
            self.down_bias = nn.Parameter(torch.randn(experts, hidden))

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and expert ids, both [tokens, k]."""
        weights, ids = torch.topk(F.softmax(self.router(hidden), dim=-1), self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return weights [tokens, experts], which are zero if an expert was not chosen."""
        weights, ids = self.choose(hidden)
        return torch.zeros(hidden.shape[0], self.experts, dtype=weights.dtype).scatter(1, ids, weights)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        gate, linear = up.chunk(2, dim=-1)
        return F.silu(gate) * linear


class GptOssDense(DenseExperts):
    """gpt-oss in transformers 4: tokens repeated for every expert, biases, weighted results."""

    has_bias = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, tokens = self.weights(hidden), hidden.shape[0]
        rows = hidden.repeat(self.experts, 1).view(self.experts, -1, self.hidden)
        up = torch.bmm(rows, self.up) + self.up_bias[..., None, :]
        results = torch.bmm(self.activate(up), self.down) + self.down_bias[..., None, :]
        results = results.view(self.experts, tokens, self.hidden)
        return (results * weights.transpose(0, 1).view(self.experts, tokens)[..., None]).sum(dim=0)


class Llama4Dense(DenseExperts):
    """Llama 4 in transformers: tokens are zero for the experts that they have not chosen; no biases."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        best, ids = torch.topk(logits, self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, best)
        scores = torch.sigmoid(scores.float()).to(hidden.dtype)
        rows = hidden.repeat(self.experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        up = torch.bmm(rows.view(self.experts, -1, self.hidden), self.up)
        results = torch.bmm(self.activate(up), self.down).view(-1, self.hidden)
        return results.reshape(self.experts, -1, self.hidden).sum(dim=0)


class EinsumDense(DenseExperts):
    """Products by einsum, with experts as the first dimension."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("th,ehf->etf", hidden, self.up)
        results = torch.einsum("etf,efh->eth", self.activate(up), self.down)
        return torch.einsum("te,eth->th", self.weights(hidden), results)


class OneHotDense(DenseExperts):
    """Products with tokens as the first dimension, and weights from one-hot vectors."""

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.choose(hidden)
        return (F.one_hot(ids, self.experts).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("th,ehf->tef", hidden, self.up)
        results = torch.einsum("tef,efh->teh", self.activate(up), self.down)
        return torch.einsum("te,teh->th", self.weights(hidden), results)


class SummedDense(OneHotDense):
    """Weights are applied before the last product, which sums over experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.activate(torch.einsum("th,ehf->tef", hidden, self.up)) * self.weights(hidden).unsqueeze(-1)
        return torch.einsum("tef,efh->th", inner, self.down)


class MatmulDense(DenseExperts):
    """Broadcast matmuls, and weights that are masked scores."""

    has_bias = True

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        _, ids = logits.topk(self.top_k, dim=-1)
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        return F.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = torch.matmul(hidden.unsqueeze(0), self.up) + self.up_bias.unsqueeze(1)
        results = torch.matmul(self.activate(up), self.down) + self.down_bias.unsqueeze(1)
        return (results * self.weights(hidden).t().unsqueeze(-1)).sum(dim=0)


class BaddbmmDense(DenseExperts):
    """Biases are added by `baddbmm`; only the best expert is chosen."""

    has_bias = True

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(self.router(hidden), dim=-1)
        return scores * F.one_hot(scores.argmax(dim=-1), self.experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.expand(self.experts, -1, -1)
        up = self.activate(torch.baddbmm(self.up_bias.unsqueeze(1), rows, self.up))
        results = torch.baddbmm(self.down_bias.unsqueeze(1), up, self.down)
        return (results * self.weights(hidden).t().unsqueeze(-1)).sum(dim=0)


class BatchDense(DenseExperts):
    """A batch of sequences, which is not flattened."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.view(1, *hidden.shape).expand(2, -1, -1) + hidden.new_tensor([0.0, 1.0])[:, None, None]
        weights, ids = torch.topk(F.softmax(self.router(hidden), dim=-1), self.top_k, dim=-1)
        dense = torch.zeros_like(self.router(hidden)).scatter(-1, ids, weights)
        up = torch.einsum("bth,ehf->btef", hidden, self.up)
        results = torch.einsum("btef,efh->bteh", self.activate(up), self.down)
        return (results * dense.unsqueeze(-1)).sum(dim=2).sum(dim=0)


TAKEN: tuple[type[DenseExperts], ...] = (
    GptOssDense, Llama4Dense, EinsumDense, OneHotDense, SummedDense, MatmulDense, BaddbmmDense, BatchDense,
)  # fmt: skip
