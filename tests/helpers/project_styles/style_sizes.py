"""Sizes of a layer in a project's style, and the weights of its experts: the same whichever rank holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class StyleSizes:
    """`hidden` H, `width` of an expert, `experts` over all ranks, `top_k` of them for each token.

    Where experts have slots, as many for each as `capacity_percent` of the tokens that uniform routing brings to it.
    `skew` is the standard deviation of a fixed bias of the router.
    """

    hidden: int = 16
    width: int = 24
    experts: int = 8
    top_k: int = 2
    capacity_percent: int = 125
    skew: float = 0.0
    dtype: torch.dtype = torch.float32

    def capacity(self, tokens: int) -> int:
        """Slots of an expert for so many tokens of a rank, at least 4."""
        return 4 + tokens * self.top_k * self.capacity_percent // (100 * self.experts)


def owned_experts(sizes: StyleSizes, rank: int, ranks: int) -> range:
    each = sizes.experts // ranks
    return range(rank * each, (rank + 1) * each)


def random_weight(sizes: StyleSizes, seed: int, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
    return nn.Parameter(weight.to(sizes.dtype), requires_grad=False)


class Router(nn.Module):
    """Scores [tokens, experts] in float32, equal on all ranks."""

    def __init__(self, sizes: StyleSizes) -> None:
        super().__init__()
        self.weight = random_weight(dataclasses.replace(sizes, dtype=torch.float32), 1, sizes.experts, sizes.hidden)
        bias = torch.randn(sizes.experts, generator=torch.Generator().manual_seed(2))
        self.bias = nn.Parameter(sizes.skew * bias, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(hidden.float(), self.weight) + self.bias
        return torch.softmax(logits, dim=-1)


class GatedExpert(nn.Module):
    """`down(silu(gate(x)) * up(x))`, three matrices of an expert of its own."""

    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__()
        self.gate = random_weight(sizes, 10 * expert + 3, sizes.width, sizes.hidden)
        self.up = random_weight(sizes, 10 * expert + 4, sizes.width, sizes.hidden)
        self.down = random_weight(sizes, 10 * expert + 5, sizes.hidden, sizes.width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        linear = nn.functional.linear
        return linear(nn.functional.silu(linear(rows, self.gate)) * linear(rows, self.up), self.down)


class BiasedExpert(nn.Module):
    """`down(gelu(up(x)))` with biases."""

    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__()
        self.up = random_weight(sizes, 10 * expert + 3, sizes.width, sizes.hidden)
        self.up_bias = random_weight(sizes, 10 * expert + 4, sizes.width)
        self.down = random_weight(sizes, 10 * expert + 5, sizes.hidden, sizes.width)
        self.down_bias = random_weight(sizes, 10 * expert + 6, sizes.hidden)

    def cut(self, part: slice, *, has_bias: bool) -> None:
        """Keep a part of the width. The parts add up where one of them has the last bias."""
        self.up, self.up_bias, self.down = (
            nn.Parameter(whole.clone(), requires_grad=False)
            for whole in (self.up[part], self.up_bias[part], self.down[:, part])
        )
        self.down_bias = nn.Parameter(self.down_bias * has_bias, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(nn.functional.linear(rows, self.up, self.up_bias))
        return nn.functional.linear(inner, self.down, self.down_bias)


def stacked(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter [experts, ..] of those of all experts."""
    return nn.Parameter(torch.stack(list(parameters)), requires_grad=False)
