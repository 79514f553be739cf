"""Fixed slots without counts, as GShard, fairscale and DeepSpeed exchange them.

Every rank sends as many slots for each expert, filled or not, so no rank tells how many rows it sends. The experts are
modules in a loop over chunks of the slots. Tokens beyond an expert's capacity are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tests.helpers.project_styles.style_sizes import (
    BiasedExpert,
    GatedExpert,
    Router,
    StyleSizes,
    owned_experts,
    stacked,
)


class EqualAllToAll(torch.autograd.Function):
    """An AllToAll of equal parts in an autograd function, written into memory that is made for it."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise NotImplementedError("these layers are for inference")


class _SlotLayer(nn.Module):
    def __init__(self, sizes: StyleSizes, group: ProcessGroup, expert: type[nn.Module]) -> None:
        super().__init__()
        self.sizes, self.group, self.ranks = sizes, group, dist.get_world_size(group)
        self.router = Router(sizes)
        owned = owned_experts(sizes, dist.get_rank(group), self.ranks)
        self.experts = nn.ModuleList(expert(sizes, number) for number in owned)

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        """`slots` [experts, capacity, H] through the experts of all ranks."""
        arrived = EqualAllToAll.apply(self.group, slots)  # type: ignore[no-untyped-call]
        arrived = arrived.reshape(self.ranks, len(self.experts), -1, self.sizes.hidden)
        outputs = self.compute(arrived).reshape(self.sizes.experts, -1, self.sizes.hidden)
        returned: torch.Tensor = EqualAllToAll.apply(self.group, outputs)  # type: ignore[no-untyped-call]
        return returned

    def compute(self, arrived: torch.Tensor) -> torch.Tensor:
        """[ranks, own experts, slots, H] through the experts of this rank."""
        chunks = arrived.chunk(len(self.experts), dim=1)
        return torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)], dim=1)


class EinsumSlots(_SlotLayer):
    """One-hot masks [tokens, experts, capacity] and einsums, as GShard describes and fairscale writes it."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group, GatedExpert)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        capacity = self.sizes.capacity(hidden.shape[0])
        scores = self.router(hidden)
        _, chosen = scores.topk(self.sizes.top_k, dim=-1)
        combine = scores.new_zeros(hidden.shape[0], self.sizes.experts, capacity)
        taken = torch.zeros(self.sizes.experts, dtype=torch.int64, device=hidden.device)
        for choice in range(self.sizes.top_k):
            mask = F.one_hot(chosen[:, choice], self.sizes.experts)
            location = torch.cumsum(mask, dim=0) - 1 + taken
            taken = taken + mask.sum(dim=0)
            mask = mask * (location < capacity)
            weight = (scores * mask).sum(dim=1, keepdim=True) * mask
            every = torch.arange(capacity, device=hidden.device)
            slot = ((location * mask).sum(dim=1, keepdim=True) == every).to(scores.dtype)
            combine = combine + torch.einsum("se,sc->sec", weight, slot)
        dispatch = combine.bool().to(hidden.dtype)
        slots = torch.einsum("sec,sm->ecm", dispatch, hidden)
        outputs = self._run(slots)
        return torch.einsum("sec,ecm->sm", combine.to(hidden.dtype), outputs)


class IndexedSlots(_SlotLayer):
    """Slots that are looked up and written by their numbers, as DeepSpeed does since 0.19; biased experts."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group, BiasedExpert)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, width = hidden.shape
        experts, capacity = self.sizes.experts, self.sizes.capacity(hidden.shape[0])
        scores = self.router(hidden)
        _, chosen = torch.topk(scores, self.sizes.top_k, dim=1)
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        location = torch.cumsum(mask, dim=0) - 1
        mask = mask & (location < capacity)
        is_kept = mask.gather(1, chosen)
        weights = scores.gather(1, chosen) * is_kept
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)
        slot = torch.where(is_kept, chosen * capacity + location.gather(1, chosen), experts * capacity)
        # The token of every slot; empty slots have the number of tokens, where a row of zeros is appended.
        token_of = torch.full((experts * capacity + 1,), tokens, dtype=torch.int64, device=hidden.device)
        every = torch.arange(tokens, device=hidden.device).unsqueeze(1).expand_as(slot)
        token_of = token_of.scatter(0, slot.reshape(-1), every.reshape(-1))
        padded = torch.cat([hidden, hidden.new_zeros(1, width)])
        slots = padded.index_select(0, token_of[:-1]).view(experts, capacity, width)
        outputs = self._run(slots).reshape(experts * capacity, width)
        outputs = torch.cat([outputs, outputs.new_zeros(1, width)])
        of_tokens = outputs.index_select(0, slot.reshape(-1)).view(tokens, self.sizes.top_k, width)
        result: torch.Tensor = (of_tokens * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
        return result


class BatchedSlots(IndexedSlots):
    """The same slots, through stacked weights in a batch of all experts of the rank."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        experts: list[Any] = list(self.experts)
        self.up, self.down = (stacked([getattr(expert, name) for expert in experts]) for name in ("up", "down"))
        self.up_bias, self.down_bias = (
            stacked([getattr(expert, name) for expert in experts]) for name in ("up_bias", "down_bias")
        )

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        owned, hidden = len(self.experts), self.sizes.hidden
        arrived = EqualAllToAll.apply(self.group, slots)  # type: ignore[no-untyped-call]
        rows = arrived.reshape(self.ranks, owned, -1, hidden).transpose(0, 1).reshape(owned, -1, hidden)
        inner = F.gelu(torch.bmm(rows, self.up.transpose(1, 2)) + self.up_bias.unsqueeze(1))
        outputs = torch.bmm(inner, self.down.transpose(1, 2)) + self.down_bias.unsqueeze(1)
        outputs = outputs.reshape(owned, self.ranks, -1, hidden).transpose(0, 1).reshape(self.sizes.experts, -1, hidden)
        returned: torch.Tensor = EqualAllToAll.apply(self.group, outputs)  # type: ignore[no-untyped-call]
        return returned
