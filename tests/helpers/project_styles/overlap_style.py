"""Two micro-batches through one layer: the exchanges of one overlap with the experts of the other.

Engines that hide AllToAlls behind compute do this (DeepSeek's two-batch overlap). Exchanges are started and awaited
later, so that the dispatch and combine of one half enclose those of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, sort_by_expert, undo_order
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.style_sizes import GatedExpert, StyleSizes, stacked_gated_experts

_c10d = torch.ops._c10d_functional


@dataclasses.dataclass
class Half:
    """The state of one half on its way through the layer: its tokens, their order, and the sizes of its exchanges."""

    hidden: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    arriving: torch.Tensor
    send: list[int]
    receive: list[int]
    under_way: torch.Tensor


class OverlappedHalves(ExactLayer):
    """Both dispatches start before the experts of the first half, whose results are sent during those of the second."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.gate, self.up, self.down = stacked_gated_experts(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        middle = hidden.shape[0] // 2
        first, second = self._dispatch(hidden[:middle]), self._dispatch(hidden[middle:])
        self._run(first)
        self._run(second)
        return torch.cat([self._combine(first), self._combine(second)])

    def _dispatch(self, hidden: torch.Tensor) -> Half:
        """Start to exchange the rows of one half."""
        weights, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=-1)
        ids, order = sort_by_expert(chosen)
        counts = count_per_expert(ids, self.sizes.experts)
        arriving, send, receive = self.exchange_counts(counts)
        rows = hidden[order // self.sizes.top_k]
        return Half(hidden, weights, order, arriving, send, receive, self._begin(rows, receive, send))

    def _run(self, half: Half) -> None:
        """Run this rank's experts on the arrived rows, and start to send their outputs back."""
        owned = len(self.owned)
        rows = _c10d.wait_tensor(half.under_way)
        local = torch.arange(owned, device=rows.device).repeat(self.ranks)
        ids, order = sort_by_expert(local.repeat_interleave(half.arriving, output_size=rows.shape[0]))
        outputs = undo_order(self._experts(rows[order], count_per_expert(ids, owned)), order)
        half.under_way = self._begin(outputs, half.send, half.receive)

    def _experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up, down = (weight.transpose(1, 2) for weight in (self.gate, self.up, self.down))
        return grouped_gemm(F.silu(grouped_gemm(rows, gate, ends)) * grouped_gemm(rows, up, ends), down, ends)

    def _combine(self, half: Half) -> torch.Tensor:
        weighed = _c10d.wait_tensor(half.under_way) * half.weights.view(-1)[half.order].unsqueeze(-1)
        summed = undo_order(weighed, half.order).view(*half.weights.shape, half.hidden.shape[1]).sum(dim=1)
        return summed.to(half.hidden.dtype)

    def _begin(self, rows: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        result: torch.Tensor = _c10d.all_to_all_single(rows, receive, send, self.group_name)
        return result


class OverlappedModules(OverlappedHalves):
    """A variant with a module for each expert, which awaits the first half's results before the second half runs."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        del self.gate, self.up, self.down
        self.experts = nn.ModuleList(GatedExpert(sizes, number) for number in self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        middle = hidden.shape[0] // 2
        first = self._dispatch(hidden[:middle])
        second = self._dispatch(hidden[middle:])
        self._run(first)
        results = [self._combine(first)]
        self._run(second)
        return torch.cat([*results, self._combine(second)])

    def _experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sizes: Sequence[int] = counts.tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        parts = zip(self.experts, rows.split(sizes), strict=True)
        return torch.cat([expert(rows_of_expert) for expert, rows_of_expert in parts])
