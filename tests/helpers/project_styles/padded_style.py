"""Each expert's rows are padded to a multiple of 128 before its GEMMs, as for kernels that compute blocks of rows.

Rows are written to their positions among zeros, and read back from there. Between the exchanges of expert parallelism
this is refused. A model with all experts on one device keeps its padding.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, undo_order
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.style_sizes import Router, StyleSizes, stacked_gated_experts

ALIGN = 128


class PaddedExperts(nn.Module):
    """Gated experts as grouped GEMMs of padded rows; `experts` are those of this rank."""

    def __init__(self, sizes: StyleSizes, experts: range) -> None:
        super().__init__()
        self.gate, self.up, self.down = stacked_gated_experts(sizes, experts)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the outputs of `rows`, which are sorted by expert, with `counts` of each."""
        number = rows.shape[0]
        padded = counts + (-counts) % ALIGN
        shift = padded.cumsum(0) - padded - (counts.cumsum(0) - counts)
        position = torch.arange(number, device=rows.device) + shift.repeat_interleave(counts, output_size=number)
        laid = rows.new_zeros((number + counts.shape[0] * ALIGN, rows.shape[1]))
        laid[position] = rows
        ends = padded.cumsum(0).to(torch.int32)
        gate, up = (grouped_gemm(laid, weights.transpose(1, 2), ends) for weights in (self.gate, self.up))
        return grouped_gemm(F.silu(gate) * up, self.down.transpose(1, 2), ends).index_select(0, position)


class PaddedRows(ExactLayer):
    """Exchanged rows are sorted by expert, and padded."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = PaddedExperts(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        order = torch.argsort(chosen.view(-1), stable=True)
        arriving, send, receive = self.exchange_counts(count_per_expert(chosen.view(-1), self.sizes.experts))
        arrived = exchange_rows(hidden[order // self.sizes.top_k], send, receive, self.group_name)
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        by_expert = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0]).argsort(stable=True)
        outputs = self.experts(arrived[by_expert], arriving.view(self.ranks, owned).sum(dim=0))
        returned = exchange_rows(undo_order(outputs, by_expert), receive, send, self.group_name)
        weighed = returned * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, weighed.to(hidden.dtype))


class LocalPadded(nn.Module):
    """The same computation with all experts on one device, without exchanges."""

    def __init__(self, sizes: StyleSizes) -> None:
        super().__init__()
        self.sizes, self.router = sizes, Router(sizes)
        self.experts = PaddedExperts(sizes, range(sizes.experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        ids, order = chosen.view(-1).sort(stable=True)
        counts = count_per_expert(ids, self.sizes.experts)
        outputs = self.experts(hidden[order // self.sizes.top_k], counts)
        weighed = outputs * scores.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, order // self.sizes.top_k, weighed.to(hidden.dtype))
