"""Loops over slices of sorted rows on one device: expert i computes the rows between two running sums of counts.

A module `Layer()` maps hidden states [tokens, HIDDEN] to [tokens, HIDDEN].
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.project_styles.local_loops import EXPERTS, HIDDEN, TOP_K, WIDTH


def random_weight(*shape: int) -> nn.Parameter:
    """Return a random parameter of `shape` that needs no gradient, scaled by its last size."""
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5, requires_grad=False)


class Routed(nn.Module):
    """A layer that sorts pairs of token and expert by expert, and calls `run` with the sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = random_weight(EXPERTS, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = (hidden @ self.router.T).softmax(-1).topk(TOP_K, dim=-1)
        counts = F.one_hot(chosen.view(-1), EXPERTS).sum(0)
        order = chosen.view(-1).argsort(stable=True)
        rows = self.run(hidden[order // TOP_K], counts, weights.view(-1)[order])
        unsorted = torch.empty_like(rows)
        unsorted[order] = rows
        return (unsorted.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def read_counts(counts: torch.Tensor) -> list[int]:
    """Return `counts` on the host, and tell the compiler that none is negative."""
    sizes: list[int] = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return sizes


class Mlp(nn.Module):
    """An expert: SiLU of one projection, times another, projected back."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH, bias), nn.Linear(HIDDEN, WIDTH, bias)
        self.down = nn.Linear(WIDTH, HIDDEN, bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(rows)) * self.up(rows))  # type: ignore[no-any-return]


class SlicesByCounts(Routed):
    """A loop over slices whose ends are checked against the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs, start = [], 0
        for expert, size in zip(self.experts, read_counts(counts), strict=True):
            end = start + size
            torch._check(end <= rows.shape[0])
            outputs.append(expert(rows[start:end]))
            start = end
        return torch.cat(outputs)


class UncheckedSlices(SlicesByCounts):
    """A loop without checks, as in model code: only the counts imply that no slice ends after the last row."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs, start = [], 0
        for expert, size in zip(self.experts, self.sizes_of(self.counts_of(counts)), strict=True):
            outputs.append(expert(rows[start : start + size]) * weights[start : start + size].unsqueeze(1))
            start += size
        return self.fit(torch.cat(outputs), rows.shape[0])

    def fit(self, outputs: torch.Tensor, rows: int) -> torch.Tensor:
        return outputs

    def counts_of(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def sizes_of(self, counts: torch.Tensor) -> list[int]:
        return counts.tolist()  # type: ignore[no-any-return]


class SlicesWithBiases(Routed):
    """Experts with biases, norms, a scale of each expert, GELU and a softmax along features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(EXPERTS))
        self.scale = random_weight(EXPERTS)

    def run(self, rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs, start = [], 0
        for number, size in enumerate(read_counts(counts)):
            end = start + size
            torch._check(end <= rows.shape[0])
            inner = F.layer_norm(F.gelu(self.up[number](rows[start:end])), (WIDTH,))
            outputs.append(self.down[number](inner.softmax(-1) * self.scale[number]))
            start = end
        return torch.cat(outputs)
