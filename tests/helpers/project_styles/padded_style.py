"""Each expert's rows are padded to a multiple of some number of rows before its GEMM; padding is removed afterwards.

There are several ways to write that. `run` takes rows [n, H] sorted by expert, their `counts` [experts], and the
function that computes padded rows. It returns outputs [n, H] in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import count_per_expert, grouped_gemm, undo_order
from tests.helpers.project_styles.exact_style import ExactLayer
from tests.helpers.project_styles.style_sizes import GatedExpert, Router, StyleSizes, stacked_gated_experts

# Takes padded rows and the number of rows of each expert, and returns their outputs.
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class StackedExperts(nn.Module):
    """Gated experts as grouped GEMMs; `experts` are those of this rank."""

    def __init__(self, sizes: StyleSizes, experts: range) -> None:
        super().__init__()
        self.gate, self.up, self.down = stacked_gated_experts(sizes, experts)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        inner = F.silu(self._gemm(rows, self.gate, ends)) * self._gemm(rows, self.up, ends)
        return self._gemm(inner, self.down, ends)

    @staticmethod
    def _gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(rows, weights.transpose(1, 2), ends)


class Padding:
    """A method to pad the rows of each expert to a multiple of `align`."""

    align = 8

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        raise NotImplementedError


class SearchedTable(Padding):
    """A table from position to row, built by a search; positions of padding contain the number of rows.

    The table has the largest length that may be needed, and its end belongs to no expert. It follows torchtitan's
    `generate_permute_indices`, without its kernel: an expert without rows has padding too, which reads a row of zeros.
    """

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, owned = rows.shape[0], counts.shape[0]
        padded = (torch.clamp_min(counts, self.align) + self.align - 1) // self.align * self.align
        ends = padded.cumsum(0)
        position = torch.arange(self.places(number, padded), device=rows.device)
        expert = torch.searchsorted(ends, position, right=True).clamp(max=owned - 1)
        within = position - (ends - padded)[expert]
        source = (counts.cumsum(0) - counts)[expert] + within
        table = torch.where(within < counts[expert], source, number)
        with_zeros = torch.vstack((rows, rows.new_zeros(rows.shape[-1])))
        outputs = experts(with_zeros[table], padded)
        unpermuted = outputs.new_empty(with_zeros.shape)
        unpermuted[table] = outputs
        return unpermuted[:-1]

    def places(self, number: int, padded: torch.Tensor) -> int:
        """Return the length of the table for `number` rows."""
        return number + padded.shape[0] * self.align


class ScatteredTable(Padding):
    """A table with the row of each position and -1 for padding; the host reads its length.

    Kernels for blocks of rows use such tables (`moe_align_block_size` of SGLang and vLLM).
    """

    align = 16

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, owned = rows.shape[0], counts.shape[0]
        padded = torch.div(counts + (self.align - 1), self.align, rounding_mode="floor") * self.align
        total = int(padded.sum().item())
        torch._check(total >= 0)
        expert = torch.arange(owned, device=rows.device).repeat_interleave(counts, output_size=number)
        shift = padded.cumsum(0) - padded - (counts.cumsum(0) - counts)
        every = torch.arange(number, device=rows.device)
        position = every + shift[expert]
        table = torch.full((total,), -1, dtype=torch.int64, device=rows.device)
        table[position] = every
        return experts(F.pad(rows, (0, 0, 0, 1))[table], padded)[position]


class ScatteredRows(Padding):
    """Rows are written to their positions among zeros, as for GEMMs with 128 rows of one expert (DeepGEMM)."""

    align = 128

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, owned = rows.shape[0], counts.shape[0]
        padded = counts + (-counts) % self.align
        start = padded.cumsum(0) - padded
        first = counts.cumsum(0) - counts
        position = torch.arange(number, device=rows.device)
        position = position + (start - first).repeat_interleave(counts, output_size=number)
        laid = rows.new_zeros((number + owned * self.align, rows.shape[1]))
        laid[position] = rows
        return experts(laid, padded).index_select(0, position)


class JoinedWithZeros(Padding):
    """Each expert's rows are joined with zeros, by sizes that the host reads (Megatron-Core's padding for fp8)."""

    align = 16

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        sizes = counts.tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        padded_sizes = [(size + self.align - 1) // self.align * self.align for size in sizes]
        parts = []
        for rows_of_expert, size, padded in zip(torch.split(rows, sizes), sizes, padded_sizes, strict=True):
            parts += [rows_of_expert, rows.new_zeros(padded - size, rows.shape[1])]
        padded = torch.div(counts + self.align - 1, self.align, rounding_mode="floor") * self.align
        outputs = experts(torch.cat(parts), padded)
        outputs_without_padding, start = [], 0
        for size, padded_size in zip(sizes, padded_sizes, strict=True):
            outputs_without_padding.append(outputs[start : start + size])
            start += padded_size
        return torch.cat(outputs_without_padding)


class PaddedModules(nn.Module):
    """A module for each expert, whose rows are padded one expert at a time (Megatron-Core's SequentialMLP)."""

    align = 16

    def __init__(self, sizes: StyleSizes, experts: range) -> None:
        super().__init__()
        self.modules_of_experts = nn.ModuleList(GatedExpert(sizes, number) for number in experts)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sizes = counts.tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        outputs = []
        for expert, rows_of_expert in zip(self.modules_of_experts, torch.split(rows, sizes), strict=True):
            size = rows_of_expert.shape[0]
            padded = (size + self.align - 1) // self.align * self.align
            padding = rows.new_zeros(padded - size, rows.shape[1])
            outputs.append(expert(torch.cat((rows_of_expert, padding)))[:size])
        return torch.cat(outputs)


class Unpadded(Padding):
    """Rows without padding, for experts that pad them."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        return experts(rows, counts)


class PaddedLayer(ExactLayer):
    """Exchanged rows are sorted by expert, padded, and computed by grouped GEMMs."""

    padding: Padding
    kind: type[StackedExperts | PaddedModules] = StackedExperts

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        self.experts = self.kind(sizes, self.owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        counts = torch.histc(chosen.view(-1).float(), self.sizes.experts, 0, self.sizes.experts).long()
        order = torch.argsort(chosen.view(-1), stable=True)
        arriving, send, receive = self.exchange_counts(counts)
        arrived = exchange_rows(hidden[order // self.sizes.top_k], send, receive, self.group_name)
        owned = len(self.owned)
        expert_of = torch.arange(owned, device=hidden.device).repeat(self.ranks)
        by_expert = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0]).argsort(stable=True)
        of_experts = arriving.view(self.ranks, owned).sum(dim=0)
        outputs = self.padding.run(arrived[by_expert], of_experts, self.experts)
        returned = exchange_rows(undo_order(outputs, by_expert), receive, send, self.group_name)
        weighed = returned * scores.view(-1)[order].unsqueeze(-1)
        token = (order // self.sizes.top_k).unsqueeze(-1).expand(-1, hidden.shape[1])
        return torch.zeros_like(hidden).scatter_add(0, token, weighed.to(hidden.dtype))


class PaddedBySearch(PaddedLayer):
    padding = SearchedTable()


class PaddedByTable(PaddedLayer):
    padding = ScatteredTable()


class PaddedByScatter(PaddedLayer):
    padding = ScatteredRows()


class PaddedByJoin(PaddedLayer):
    padding = JoinedWithZeros()


class ModulesThatPad(PaddedLayer):
    padding, kind = Unpadded(), PaddedModules


class LocalPadded(nn.Module):
    """The same computation with all experts on one device, without exchanges."""

    def __init__(
        self, sizes: StyleSizes, padding: Padding, kind: type[StackedExperts | PaddedModules] = StackedExperts
    ) -> None:
        super().__init__()
        self.sizes, self.padding = sizes, padding
        self.router = Router(sizes)
        self.experts = kind(sizes, range(sizes.experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        ids, order = chosen.view(-1).sort(stable=True)
        counts = count_per_expert(ids, self.sizes.experts)
        outputs = self.padding.run(hidden[order // self.sizes.top_k], counts, self.experts)
        weighed = outputs * scores.view(-1)[order].unsqueeze(-1)
        token = (order // self.sizes.top_k).unsqueeze(-1).expand(-1, hidden.shape[1])
        return torch.zeros_like(hidden).scatter_add(0, token, weighed.to(hidden.dtype))
