"""The sizes of a layer in a project's style, and the weights of its experts, which are the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class StyleSizes:
    """The sizes of a layer.

    Attributes:
        hidden: Size of a hidden state, H.
        width: Size between the products of an expert.
        experts: Number of experts on all ranks.
        top_k: Number of experts of each token.
        capacity_percent: For experts with slots, the slots of each in percent of its tokens under uniform routing.
        skew: Standard deviation of a fixed bias of the router.
        dtype: Type of experts and hidden states.
    """

    hidden: int = 16
    width: int = 24
    experts: int = 8
    top_k: int = 2
    capacity_percent: int = 125
    skew: float = 0.0
    dtype: torch.dtype = torch.float32

    def capacity(self, tokens: int) -> int:
        """Return the slots of an expert for `tokens` tokens of a rank, at least 4."""
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
    """An expert `down(silu(gate(x)) * up(x))` with three matrices."""

    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__()
        self.gate = random_weight(sizes, 10 * expert + 3, sizes.width, sizes.hidden)
        self.up = random_weight(sizes, 10 * expert + 4, sizes.width, sizes.hidden)
        self.down = random_weight(sizes, 10 * expert + 5, sizes.hidden, sizes.width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        linear = nn.functional.linear
        return linear(nn.functional.silu(linear(rows, self.gate)) * linear(rows, self.up), self.down)


class BiasedExpert(nn.Module):
    """An expert `down(gelu(up(x)))` with biases."""

    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__()
        self.up = random_weight(sizes, 10 * expert + 3, sizes.width, sizes.hidden)
        self.up_bias = random_weight(sizes, 10 * expert + 4, sizes.width)
        self.down = random_weight(sizes, 10 * expert + 5, sizes.hidden, sizes.width)
        self.down_bias = random_weight(sizes, 10 * expert + 6, sizes.hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(nn.functional.linear(rows, self.up, self.up_bias))
        return nn.functional.linear(inner, self.down, self.down_bias)


def stacked(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """Return one parameter [experts, ..] from those of all experts."""
    return nn.Parameter(torch.stack(list(parameters)), requires_grad=False)


def stacked_gated_experts(sizes: StyleSizes, experts: Iterable[int]) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """Return the gate, up and down matrices of `experts`, each stacked."""
    modules = [GatedExpert(sizes, expert) for expert in experts]
    gates, ups, downs = ([getattr(module, name) for module in modules] for name in ("gate", "up", "down"))
    return stacked(gates), stacked(ups), stacked(downs)


def masked_routing(router: Router, hidden: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities and the mask of the chosen experts, both [tokens, experts]."""
    scores = router(hidden)
    weights, chosen = torch.topk(scores, top_k, dim=1)
    probabilities = torch.zeros_like(scores).scatter(1, chosen, weights)
    mask = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()
    return probabilities.to(hidden.dtype), mask
