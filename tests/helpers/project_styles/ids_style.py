"""Expert ids are exchanged with the rows: ranks count rows only by rank, and the receiver sorts by id."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, undo_order
from tests.helpers.project_styles.style_sizes import (
    GatedExpert,
    Router,
    StyleSizes,
    owned_experts,
    stacked_gated_experts,
)


class _IdsLayer(nn.Module):
    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.sizes, self.group_name, self.ranks = sizes, group.group_name, dist.get_world_size(group)
        self.router = Router(sizes)
        self.owned = owned_experts(sizes, dist.get_rank(group), self.ranks)

    def _exchange_sizes(self, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the number of rows to send to each rank, `counts` [ranks], and to receive from it."""
        each = [1] * self.ranks
        receive = exchange_rows(counts, each, each, self.group_name).tolist()
        send = counts.tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        return send, receive

    def _exchange(self, values: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return exchange_rows(values, send, receive, self.group_name)


class GlobalIdsTravel(_IdsLayer):
    """Rows are sorted by expert, global expert ids are sent, and experts are grouped GEMMs."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.gate, self.up, self.down = stacked_gated_experts(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=-1)
        ids, order = torch.sort(chosen.view(-1), stable=True)
        counts = count_per_expert(ids // len(self.owned), self.ranks)
        send, receive = self._exchange_sizes(counts)
        rows = self._exchange(hidden[order // self.sizes.top_k], send, receive)
        local = self._exchange(ids, send, receive) - self.owned.start
        by_expert = torch.argsort(local, stable=True)
        ends = count_per_expert(local, len(self.owned)).cumsum(0, dtype=torch.int32)
        rows = rows[by_expert]
        inner = F.silu(self._gemm(rows, self.gate, ends)) * self._gemm(rows, self.up, ends)
        outputs = undo_order(self._gemm(inner, self.down, ends), by_expert)
        returned = self._exchange(outputs, receive, send)
        weighed = returned * weights.view(-1)[order].unsqueeze(-1)
        summed = undo_order(weighed, order).view(*chosen.shape, -1).sum(dim=1)
        return summed.to(hidden.dtype)

    @staticmethod
    def _gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(rows, weights.transpose(1, 2), ends)


class LocalIdsTravel(_IdsLayer):
    """A loop over modules; rows are sorted by rank only, local expert ids are sent, and experts apply the weights."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = nn.ModuleList(GatedExpert(sizes, number) for number in self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        owned, top_k = len(self.owned), self.sizes.top_k
        weights, chosen = self.router(hidden).topk(top_k, dim=-1)
        rank_of = torch.div(chosen, owned, rounding_mode="floor").reshape(-1)
        order = rank_of.argsort(stable=True)
        counts = F.one_hot(rank_of, self.ranks).sum(dim=0)
        send, receive = self._exchange_sizes(counts)
        number = (chosen % owned).reshape(-1)[order]
        arrived = self._exchange(hidden.index_select(0, order // top_k), send, receive)
        arrived_number = self._exchange(number.int(), send, receive).long()
        arrived_weight = self._exchange(weights.reshape(-1)[order].to(hidden.dtype), send, receive)
        by_expert = arrived_number.argsort(stable=True)
        rows = arrived[by_expert]
        sizes = F.one_hot(arrived_number, owned).sum(dim=0).tolist()
        outputs, start = [], 0
        for expert, size in zip(self.experts, sizes, strict=True):
            torch._check(size >= 0)
            torch._check(start + size <= rows.shape[0])
            outputs.append(expert(rows[start : start + size]))
            start = start + size
        placed = torch.empty_like(arrived)
        placed[by_expert] = torch.cat(outputs)
        returned = self._exchange(placed * arrived_weight.unsqueeze(-1), receive, send)
        token = (order // top_k).unsqueeze(-1).expand(-1, hidden.shape[1])
        return torch.zeros_like(hidden).scatter_add(0, token, returned)
