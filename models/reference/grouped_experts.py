"""Gated experts by grouped GEMMs: tokens sorted by expert, one grouped GEMM for all experts, a sum in top-k order.

Shapes: hidden_states [tokens, H], top_k_index [tokens, k] (int64), top_k_weights [tokens, k]; S = tokens * k pairs of a
token and an expert, flattened token by token. The arithmetic, including the order of the weighted sum, equals
`grouped_mm_experts_forward` in transformers.
"""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  registers the fallback operator of grouped_mm
from torch import nn
from torch.nn import functional as F


class GroupedExperts(nn.Module):
    """E experts `down(silu(gate(x)) * up(x))` on one device: the reference for expert parallelism.

    `gate_up_proj` is [E, 2h, H], the gate's rows first, and `down_proj` [E, H, h]. Their rows must be multiples of 16
    bytes, as grouped GEMMs require.
    """

    def __init__(self, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj, requires_grad=False)
        self.down_proj = nn.Parameter(down_proj, requires_grad=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts [tokens, H], in the dtype of `hidden_states`."""
        expert_ids, order = sort_by_expert(top_k_index)
        counts = count_per_expert(expert_ids, self.gate_up_proj.shape[0])
        rows = self.run_groups(hidden_states[order // top_k_index.shape[1]], counts)
        return weighted_sum(rows, order, top_k_weights).to(hidden_states.dtype)

    def run_groups(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [n, H] for `rows` [n, H] sorted by expert, `counts` [E] for each.

        Rows beyond sum(counts) belong to no expert; their outputs are uninitialised.
        """
        # The grouped GEMM requires int32.
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_gemm(rows, self.gate_up_proj.transpose(1, 2), ends).chunk(2, dim=-1)
        return grouped_gemm(F.silu(gate) * up, self.down_proj.transpose(1, 2), ends)

    def run_some(self, hidden_states: torch.Tensor, local_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the pairs of these experts; other pairs have the id E, and their output is zero.

        Takes hidden_states [tokens, H] and local_ids [tokens, k] in 0..E; returns rows [S, H], sorted by expert, and
        the order [S] that sorted them.
        """
        experts = self.gate_up_proj.shape[0]
        sorted_ids, order = sort_by_expert(local_ids)
        rows = hidden_states[order // local_ids.shape[1]]
        if experts == 0:
            return torch.zeros_like(rows), order
        rows = self.run_groups(rows, count_per_expert(sorted_ids, experts))
        return rows.masked_fill((sorted_ids == experts).unsqueeze(-1), 0.0), order


def grouped_gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute `rows[ends[e - 1]:ends[e]] @ weights[e]` for every e: [n, in] and [E, in, out] to [n, out]."""
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        # torch captures grouped_mm in bfloat16 only (all floating point types from 2.14 on).
        result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
        return result
    return F.grouped_mm(rows, weights, offs=ends)


def sort_by_expert(expert_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted ids and the order, both [S], of ids of any shape; pairs of one expert keep their order."""
    sorted_ids, order = torch.sort(expert_ids.reshape(-1), stable=True)
    return sorted_ids, order


def count_per_expert(expert_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Count the occurrences of 0..experts-1 in `expert_ids` [S]: int64 [experts]. The id `experts` is not counted."""
    zeros = expert_ids.new_zeros(experts + 1)
    return zeros.scatter_add(0, expert_ids, torch.ones_like(expert_ids))[:experts]


def undo_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows` [n, ...] in the order before `order` [n] was applied."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return rows[inverse]


def weighted_sum(rows: torch.Tensor, order: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return sorted rows [S, H] times their weights, summed for each token in the order of its top-k: [tokens, H]."""
    tokens, top_k = top_k_weights.shape
    weighted = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return undo_order(weighted, order).view(tokens, top_k, rows.shape[1]).sum(dim=1)
