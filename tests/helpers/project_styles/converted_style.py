"""Weights and rows that are converted in every run: float32 masters, flat and quantised weights, a narrow wire type.

torchtitan's experts have float32 masters and bfloat16 products, MegaBlocks has one flat matrix of all experts, and some
layers have scales and norms of each expert between its products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.style_sizes import GatedExpert, StyleSizes, random_weight, stacked


class _ConvertedLayer(ExactLayer):
    """A layer that exchanges rows as `wire`, and runs its experts on them as `inner`."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup, wire: torch.dtype, inner: torch.dtype) -> None:
        super().__init__(sizes, group)
        self.wire, self.inner = wire, inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).topk(self.sizes.top_k, dim=-1)
        ids, order = chosen.view(-1).sort(stable=True)
        every = torch.arange(self.sizes.experts, device=hidden.device)
        ends = torch.searchsorted(ids, every, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        arriving, send, receive = self.exchange_counts(counts)
        sent = hidden[order // self.sizes.top_k].to(self.wire)
        arrived = exchange_rows(sent, send, receive, self.group_name)
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        by_expert = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0]).argsort(stable=True)
        rows = arrived[by_expert].to(self.inner)
        sizes = arriving.view(self.ranks, owned).sum(dim=0).tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        parts = torch.split(rows, sizes, dim=0)
        joined = torch.cat(
            [expert(rows_of_expert) for expert, rows_of_expert in zip(self._experts(), parts, strict=True)], dim=0
        )
        joined = joined.to(self.wire)
        unsorted = torch.empty_like(joined)
        unsorted[by_expert] = joined
        returned = exchange_rows(unsorted, receive, send, self.group_name)
        of_pairs = torch.empty_like(returned)
        of_pairs[order] = returned
        of_tokens = of_pairs.view(*chosen.shape, -1).float() * weights.unsqueeze(-1)
        result: torch.Tensor = of_tokens.sum(dim=1).to(hidden.dtype)
        return result

    def _experts(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        """Return one function of rows for each expert of this rank."""
        raise NotImplementedError


def _gated(rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)


class MasterWeights(_ConvertedLayer):
    """Float32 parameters that every run converts to bfloat16, as it does the rows."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group, sizes.dtype, torch.bfloat16)
        masters = dataclasses.replace(sizes, dtype=torch.float32)
        experts = [GatedExpert(masters, number) for number in self.owned]
        self.w1 = stacked([expert.gate for expert in experts])
        self.w3 = stacked([expert.up for expert in experts])
        self.w2 = stacked([expert.down for expert in experts])

    def _experts(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        def expert(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda rows: _gated(rows, *(stack[number].bfloat16() for stack in (self.w1, self.w3, self.w2)))

        return [expert(number) for number in range(len(self.owned))]


class FlatWeights(_ConvertedLayer):
    """One matrix of all experts for each product, and rows in bfloat16 during exchanges only."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group, torch.bfloat16, sizes.dtype)
        experts = [GatedExpert(sizes, number) for number in self.owned]
        self.gate_and_up = nn.Parameter(torch.cat([torch.cat([expert.gate, expert.up]) for expert in experts]), False)
        self.down = nn.Parameter(torch.cat([expert.down.T for expert in experts]), requires_grad=False)

    def _experts(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        both = self.gate_and_up.view(len(self.owned), 2, self.sizes.width, self.sizes.hidden)
        downs = self.down.view(len(self.owned), self.sizes.width, self.sizes.hidden).transpose(1, 2)

        def expert(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda rows: _gated(rows, both[number, 0], both[number, 1], downs[number])

        return [expert(number) for number in range(len(self.owned))]


class ScaledExpert(GatedExpert):
    """An expert with bfloat16 weights and a scale for each output; a norm and another scale follow the first."""

    def __init__(self, sizes: StyleSizes, expert: int) -> None:
        super().__init__(dataclasses.replace(sizes, dtype=torch.bfloat16), expert)
        self.inner = sizes.dtype
        self.gate_scale = random_weight(sizes, 10 * expert + 6, sizes.width, 1)
        self.norm = random_weight(sizes, 10 * expert + 7, sizes.width)
        self.alpha = random_weight(sizes, 10 * expert + 8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.gate.to(self.inner) * self.gate_scale
        inner = F.silu(F.linear(rows, gate)) * F.linear(rows, self.up.to(self.inner))
        scale = torch.rsqrt(inner.float().square().mean(dim=-1, keepdim=True) + 1e-6).to(inner.dtype)
        return F.linear(inner * scale * self.norm * self.alpha, self.down.to(self.inner))


class ScaledModules(_ConvertedLayer):
    """Modules with quantised weights, and scales and norms for each expert."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group, sizes.dtype, sizes.dtype)
        self.experts = nn.ModuleList(ScaledExpert(sizes, number) for number in self.owned)

    def _experts(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]]:
        return list(self.experts)
