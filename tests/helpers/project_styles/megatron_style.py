"""Masks instead of sorts, counts by AllGather, and exchanged weights, as in Megatron-Core's AllToAll dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import gather_rows
from tests.helpers.project_styles.style_sizes import GatedExpert, Router, StyleSizes, masked_routing, owned_experts


class UnevenAllToAll(torch.autograd.Function):
    """An AllToAll of given sizes in an autograd function, which allocates its result."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, sent: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        sent = sent.contiguous()
        received = sent.new_empty([sum(receive), *sent.shape[1:]])
        dist.all_to_all_single(received, sent, output_split_sizes=receive, input_split_sizes=send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        raise NotImplementedError("these layers are for inference")


class WeighedExpert(GatedExpert):
    """An expert that applies the weights of its rows before its last matrix."""

    def forward(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        inner = F.silu(F.linear(rows, self.gate)) * F.linear(rows, self.up)
        return F.linear((inner * weights.unsqueeze(-1)).to(rows.dtype), self.down)


class MaskedDispatch(nn.Module):
    """The AllToAll dispatcher with experts one after the other (`SequentialMLP`)."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.router = Router(sizes)
        self.owned = owned_experts(sizes, dist.get_rank(group), self.ranks)
        self.experts = nn.ModuleList(WeighedExpert(sizes, number) for number in self.owned)
        chunks = torch.arange(sizes.experts)
        self.by_expert = chunks.reshape(-1, len(self.owned)).T.ravel().tolist()
        self.by_rank = chunks.reshape(len(self.owned), -1).T.ravel().tolist()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        probabilities, mask = self._route(hidden)
        counts = mask.sum(dim=0)
        owned = len(self.owned)
        send = counts.reshape(self.ranks, owned).sum(dim=1).tolist()
        of_all = gather_rows(counts, self.ranks, self.group.group_name).reshape(self.ranks, -1)
        arriving = of_all[:, self.owned.start : self.owned.stop].contiguous()
        receive = arriving.sum(dim=1).tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        by_expert = mask.T.contiguous()
        every = torch.arange(hidden.shape[0], device=hidden.device).unsqueeze(0).expand(self.sizes.experts, -1)
        tokens = every.masked_select(by_expert)
        weights = probabilities.T.contiguous().masked_select(by_expert)
        rows = hidden.index_select(0, tokens)
        torch._check(sum(send) == rows.shape[0])
        arrived = UnevenAllToAll.apply(self.group, rows, receive, send)  # type: ignore[no-untyped-call]
        with_them = UnevenAllToAll.apply(self.group, weights, receive, send)  # type: ignore[no-untyped-call]
        if owned > 1:
            arrived = _in_chunks(arrived, arriving.ravel(), self.by_expert)
            with_them = _in_chunks(with_them, arriving.ravel(), self.by_expert)
        outputs = self._run(arrived, with_them, arriving.sum(dim=0).tolist())
        if owned > 1:
            outputs = _in_chunks(outputs, arriving.T.ravel(), self.by_rank)
        returned = UnevenAllToAll.apply(self.group, outputs, send, receive)  # type: ignore[no-untyped-call]
        summed = torch.zeros_like(hidden)
        return summed.scatter_add_(0, tokens.unsqueeze(1).expand(-1, hidden.shape[1]), returned)

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_routing(self.router, hidden, self.sizes.top_k)

    def _run(self, rows: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = zip(self.experts, torch.split(rows, sizes), torch.split(weights, sizes), strict=True)
        return torch.cat([expert(rows_of_expert, weight) for expert, rows_of_expert, weight in parts], dim=0)


def _in_chunks(values: torch.Tensor, sizes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Split `values` into chunks of `sizes`, and join them in another order."""
    parts = torch.split(values, sizes.tolist(), dim=0)
    return torch.cat([parts[index] for index in order], dim=0)
