"""AllToAlls of exact sizes around loops over experts, as DeepSeek and torchtitan publish them.

The ranks exchange the number of rows for each expert; the host reads the counts, and cuts the sorted rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from tests.helpers.project_styles.style_sizes import (
    GatedExpert,
    Router,
    StyleSizes,
    owned_experts,
    stacked_gated_experts,
)


class ExactLayer(nn.Module):
    """A router, and an exchange of counts that the host reads."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.sizes, self.group_name, self.ranks = sizes, group.group_name, dist.get_world_size(group)
        self.router = Router(sizes)
        self.owned = owned_experts(sizes, dist.get_rank(group), self.ranks)

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the counts of each own expert by source rank, and the sizes to send to and receive from ranks."""
        owned = len(self.owned)
        arriving = exchange_rows(counts, [owned] * self.ranks, [owned] * self.ranks, self.group_name)
        send = counts.view(self.ranks, owned).sum(dim=1).tolist()
        receive = arriving.view(self.ranks, owned).sum(dim=1).tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        return arriving, send, receive


class SlicesOfModules(ExactLayer):
    """Experts are modules; each gets a slice of the sorted rows, as in DeepSeek's published model code."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = nn.ModuleList(GatedExpert(sizes, number) for number in self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).topk(self.sizes.top_k, dim=-1)
        counts = chosen.new_zeros((chosen.shape[0], self.sizes.experts)).scatter_(1, chosen, 1).sum(dim=0)
        order = chosen.view(-1).argsort()
        sorted_rows = hidden[order // chosen.shape[1]]
        arriving, send, receive = self.exchange_counts(counts)
        arrived = exchange_rows(sorted_rows, send, receive, self.group_name)
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        expert_of = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0])
        by_expert = expert_of.argsort(stable=True)
        rows = arrived[by_expert]
        outputs, start = [], 0
        for expert, size in zip(self.experts, arriving.view(self.ranks, owned).sum(dim=0).tolist(), strict=True):
            outputs.append(expert(rows[start : start + size]))
            start += size
        joined = torch.cat(outputs, dim=0)
        unsorted = torch.empty_like(joined)
        unsorted[by_expert] = joined
        returned = exchange_rows(unsorted, receive, send, self.group_name)
        of_pairs = torch.empty_like(returned)
        of_pairs[order] = returned
        of_tokens = of_pairs.view(*chosen.shape, -1) * weights.unsqueeze(-1)
        result: torch.Tensor = of_tokens.sum(dim=1).to(hidden.dtype)
        return result


class SplitOfStacks(ExactLayer):
    """Stacked weights, and rows that are split by a list, like torchtitan's experts without grouped GEMMs."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.w1, self.w3, self.w2 = stacked_gated_experts(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        counts = torch.histc(chosen.view(-1).float(), self.sizes.experts, 0, self.sizes.experts).long()
        order = torch.argsort(chosen.view(-1), stable=True)
        rows = hidden.index_select(0, order // self.sizes.top_k)
        arriving, send, receive = self.exchange_counts(counts)
        arrived = exchange_rows(rows, send, receive, self.group_name)
        owned = len(self.owned)
        starts = arriving.cumsum(0) - arriving
        by_expert = arriving.view(self.ranks, owned).t().reshape(-1)
        permuted_starts = starts.view(self.ranks, owned).t().reshape(-1)
        within = torch.arange(arrived.shape[0], device=hidden.device)
        within = within - (by_expert.cumsum(0) - by_expert).repeat_interleave(by_expert, output_size=arrived.shape[0])
        places = permuted_starts.repeat_interleave(by_expert, output_size=arrived.shape[0]) + within
        outputs = self._run(arrived[places], arriving.view(self.ranks, owned).sum(dim=0))
        unpermuted = outputs.new_empty(outputs.shape)
        unpermuted[places] = outputs
        returned = exchange_rows(unpermuted, receive, send, self.group_name)
        weighed = (returned.float() * scores.view(-1)[order].unsqueeze(-1)).to(hidden.dtype)
        token = (order // self.sizes.top_k).unsqueeze(-1).expand(-1, hidden.shape[1])
        return torch.zeros_like(hidden).scatter_add(0, token, weighed)

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sizes = counts.tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        outputs = []
        for number, rows_of_expert in enumerate(torch.split(rows, sizes, dim=0)):
            inner = F.silu(torch.matmul(rows_of_expert, self.w1[number].transpose(-2, -1)))
            inner = inner * torch.matmul(rows_of_expert, self.w3[number].transpose(-2, -1))
            outputs.append(torch.matmul(inner, self.w2[number].transpose(-2, -1)))
        return torch.cat(outputs, dim=0)
