"""Experts with unmerged low-rank adapters (LoRA): a pair of matrices for each matrix of an expert."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tests.helpers.project_styles.exact_style import SlicesOfModules
from tests.helpers.project_styles.style_sizes import StyleSizes, random_weight

RANK, SCALE = 4, 0.5


class LowRankLinear(nn.Module):
    """A linear layer x W + (x A) B · scale."""

    def __init__(self, sizes: StyleSizes, seed: int, inner: int, outer: int, scale: nn.Parameter) -> None:
        super().__init__()
        self.weight = random_weight(sizes, seed, outer, inner)
        self.low = random_weight(sizes, seed + 1000, RANK, inner)
        self.high = random_weight(sizes, seed + 2000, outer, RANK)
        self.scale = scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight) + F.linear(F.linear(rows, self.low), self.high) * self.scale


class LowRankExpert(nn.Module):
    def __init__(self, sizes: StyleSizes, expert: int, scale: nn.Parameter) -> None:
        super().__init__()
        self.gate = LowRankLinear(sizes, 10 * expert + 3, sizes.hidden, sizes.width, scale)
        self.up = LowRankLinear(sizes, 10 * expert + 4, sizes.hidden, sizes.width, scale)
        self.down = LowRankLinear(sizes, 10 * expert + 5, sizes.width, sizes.hidden, scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return result


class LowRankModules(SlicesOfModules):
    """DeepSeek's published code with such experts."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        # With dynamic=True, torch treats a Python number as an input that may change between runs.
        scale = nn.Parameter(torch.tensor(SCALE, dtype=sizes.dtype), requires_grad=False)
        self.experts = nn.ModuleList(LowRankExpert(sizes, number, scale) for number in self.owned)
