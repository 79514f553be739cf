"""All ranks have all tokens and select those of their experts by masks, as Megatron-Core's AllGather dispatcher does.

Every rank gathers all tokens, the map [tokens, experts] of chosen experts, and their probabilities. It runs its own
experts on the tokens that its columns of the map select. A ReduceScatter adds up the partial results of each token.
Every rank must have the same number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from moepass.models.reference.collectives import gather_rows, scatter_sums
from moepass.models.reference.grouped_experts import grouped_gemm
from tests.helpers.project_styles.megatron_style import WeighedExpert
from tests.helpers.project_styles.style_sizes import (
    GatedExpert,
    Router,
    StyleSizes,
    masked_routing,
    owned_experts,
    stacked,
)


class GatherTokens(torch.autograd.Function):
    """An AllGather in an autograd function, which allocates its result."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
        gathered = sent.new_empty([sent.shape[0] * group.size(), *sent.shape[1:]])
        dist.all_gather_into_tensor(gathered, sent.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise NotImplementedError("these layers are for inference")


class ScatterSums(torch.autograd.Function):
    """A ReduceScatter in an autograd function, which allocates its result."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
        scattered = sent.new_empty([sent.shape[0] // group.size(), *sent.shape[1:]])
        dist.reduce_scatter_tensor(scattered, sent.contiguous(), group=group)
        return scattered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise NotImplementedError("these layers are for inference")


class _GatheredLayer(nn.Module):
    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.router = Router(sizes)
        self.owned = owned_experts(sizes, dist.get_rank(group), self.ranks)

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_routing(self.router, hidden, self.sizes.top_k)


class GatheredMasks(_GatheredLayer):
    """Tokens are selected by masks; experts are modules that apply the probabilities themselves (`SequentialMLP`)."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = nn.ModuleList(WeighedExpert(sizes, number) for number in self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities, mask = self._route(hidden)
        mask = GatherTokens.apply(self.group, mask)  # type: ignore[no-untyped-call]
        probabilities = GatherTokens.apply(self.group, probabilities)  # type: ignore[no-untyped-call]
        every = GatherTokens.apply(self.group, hidden)  # type: ignore[no-untyped-call]
        own_mask = mask[:, self.owned.start : self.owned.stop].contiguous()
        own_probabilities = probabilities[:, self.owned.start : self.owned.stop].contiguous()
        counts = own_mask.sum(dim=0).long()
        by_expert = own_mask.T.contiguous()
        numbers = torch.arange(every.shape[0], device=hidden.device).unsqueeze(0).expand(len(self.owned), -1)
        tokens = numbers.masked_select(by_expert)
        rows = every.index_select(0, tokens)
        weights = own_probabilities.T.contiguous().masked_select(own_mask.T.contiguous())
        outputs = self._run(rows, weights, counts.tolist())
        summed = torch.zeros_like(every)
        summed = summed.scatter_add_(0, tokens.unsqueeze(1).expand(-1, hidden.shape[1]), outputs)
        result: torch.Tensor = ScatterSums.apply(self.group, summed)  # type: ignore[no-untyped-call]
        return result

    def _run(self, rows: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        torch._check(sum(sizes) == weights.shape[0])
        parts = zip(self.experts, torch.split(rows, sizes), torch.split(weights, sizes), strict=True)
        return torch.cat([expert(rows_of_expert, weight) for expert, rows_of_expert, weight in parts], dim=0)


class DroppingMasks(GatheredMasks):
    """Tokens beyond an expert's capacity are dropped, the last ones on each rank first."""

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, mask = super()._route(hidden)
        location = torch.cumsum(mask, dim=0) - 1
        mask = torch.logical_and(mask, location < self.sizes.capacity(hidden.shape[0]))
        return probabilities * mask, mask


class GatheredOrder(_GatheredLayer):
    """Tokens are looked up in the order of the sorted map; probabilities are applied after grouped GEMMs."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        experts = [GatedExpert(sizes, number) for number in self.owned]
        self.gate_up = stacked([nn.Parameter(torch.cat([expert.gate, expert.up])) for expert in experts])
        self.down = stacked([expert.down for expert in experts])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities, mask = self._route(hidden)
        group, ranks = self.group.group_name, self.ranks
        owned = slice(self.owned.start, self.owned.stop)
        by_expert = gather_rows(mask, ranks, group)[:, owned].t().reshape(-1)
        weights = gather_rows(probabilities, ranks, group)[:, owned].t().reshape(-1)
        every = gather_rows(hidden, ranks, group)
        total = int(by_expert.sum().item())
        torch._check(total >= 0)
        torch._check(total <= by_expert.shape[0])
        order = by_expert.to(torch.int8).argsort(descending=True, stable=True)[:total]
        tokens = order % every.shape[0]
        counts = by_expert.view(len(self.owned), -1).sum(dim=1)
        outputs = self.compute(every[tokens], counts) * weights[order].unsqueeze(-1)
        summed = torch.zeros_like(every).index_add(0, tokens, outputs)
        return scatter_sums(summed, ranks, group)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the results of the experts for `rows`, of which `counts` belong to each expert."""
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
        return grouped_gemm(nn.functional.silu(gate) * up, self.down.transpose(1, 2), ends)
