"""Each expert's rows are padded to a multiple of some rows before its GEMM, and the padding is taken off behind it.

Several ways to write that: `run` takes rows [n, H] sorted by expert, `counts` [experts] of them for each, and what
computes padded rows. Outputs are [n, H], in the order of the rows.
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
from tests.helpers.project_styles.style_sizes import GatedExpert, Router, StyleSizes, stacked

# Of padded rows, of which each expert has so many: their outputs.
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class StackedExperts(nn.Module):
    """Gated experts by grouped GEMMs, of `experts` among all."""

    def __init__(self, sizes: StyleSizes, experts: range) -> None:
        super().__init__()
        modules = [GatedExpert(sizes, number) for number in experts]
        self.gate = stacked([one.gate for one in modules])
        self.up = stacked([one.up for one in modules])
        self.down = stacked([one.down for one in modules])

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        inner = F.silu(self._gemm(rows, self.gate, ends)) * self._gemm(rows, self.up, ends)
        return self._gemm(inner, self.down, ends)

    @staticmethod
    def _gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(rows, weights.transpose(1, 2), ends)


class Padding:
    """How rows are padded: to a multiple of `align` for each expert."""

    align = 8

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        raise NotImplementedError


class SearchedTable(Padding):
    """A table with the row for each place, made by a search, and the number of rows where there is none.

    The table is as long as it may have to be, and its end belongs to no expert. As torchtitan's `generate_permute_
    indices`, without its kernel: an expert without rows has some of padding, and a row of zeros stands for these.
    """

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, own = rows.shape[0], counts.shape[0]
        padded = (torch.clamp_min(counts, self.align) + self.align - 1) // self.align * self.align
        ends = padded.cumsum(0)
        place = torch.arange(self.places(number, padded), device=rows.device)
        expert = torch.searchsorted(ends, place, right=True).clamp(max=own - 1)
        within = place - (ends - padded)[expert]
        source = (counts.cumsum(0) - counts)[expert] + within
        table = torch.where(within < counts[expert], source, number)
        with_zeros = torch.vstack((rows, rows.new_zeros(rows.shape[-1])))
        outputs = experts(with_zeros[table], padded)
        unpermuted = outputs.new_empty(with_zeros.shape)
        unpermuted[table] = outputs
        return unpermuted[:-1]

    def places(self, number: int, padded: torch.Tensor) -> int:
        """How long the table is for so many rows."""
        return number + padded.shape[0] * self.align


class ScatteredTable(Padding):
    """A table that is filled where rows are, and -1 elsewhere, for as many places as there are, which the host reads.

    As kernels for blocks of rows want it (`moe_align_block_size` of SGLang and vLLM).
    """

    align = 16

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, own = rows.shape[0], counts.shape[0]
        padded = torch.div(counts + (self.align - 1), self.align, rounding_mode="floor") * self.align
        total = int(padded.sum().item())
        torch._check(total >= 0)
        expert = torch.arange(own, device=rows.device).repeat_interleave(counts, output_size=number)
        shift = padded.cumsum(0) - padded - (counts.cumsum(0) - counts)
        every = torch.arange(number, device=rows.device)
        place = every + shift[expert]
        table = torch.full((total,), -1, dtype=torch.int64, device=rows.device)
        table[place] = every
        return experts(F.pad(rows, (0, 0, 0, 1))[table], padded)[place]


class ScatteredRows(Padding):
    """Rows are written to their places among zeros, as for GEMMs that want 128 rows of one expert (DeepGEMM)."""

    align = 128

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        number, own = rows.shape[0], counts.shape[0]
        padded = counts + (-counts) % self.align
        start = padded.cumsum(0) - padded
        first = counts.cumsum(0) - counts
        place = torch.arange(number, device=rows.device)
        place = place + (start - first).repeat_interleave(counts, output_size=number)
        laid = rows.new_zeros((number + own * self.align, rows.shape[1]))
        laid[place] = rows
        return experts(laid, padded).index_select(0, place)


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
        for part, size, padded in zip(torch.split(rows, sizes), sizes, padded_sizes, strict=True):
            parts += [part, rows.new_zeros(padded - size, rows.shape[1])]
        padded = torch.div(counts + self.align - 1, self.align, rounding_mode="floor") * self.align
        outputs = experts(torch.cat(parts), padded)
        kept, start = [], 0
        for size, padded_size in zip(sizes, padded_sizes, strict=True):
            kept.append(outputs[start : start + size])
            start += padded_size
        return torch.cat(kept)


class PaddedModules(nn.Module):
    """A module for each expert, whose rows are padded one expert after the other (Megatron-Core's SequentialMLP)."""

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
        for expert, part in zip(self.modules_of_experts, torch.split(rows, sizes), strict=True):
            size = part.shape[0]
            padded = (size + self.align - 1) // self.align * self.align
            padding = rows.new_zeros(padded - size, rows.shape[1])
            outputs.append(expert(torch.cat((part, padding)))[:size])
        return torch.cat(outputs)


class Unpadded(Padding):
    """Rows as they are, for experts that pad them."""

    def run(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        return experts(rows, counts)


class PaddedLayer(ExactLayer):
    """Exchanged rows, sorted by expert, padded, and through grouped GEMMs."""

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
        own = len(self.owned)
        expert_of = torch.arange(own, device=hidden.device).repeat(self.ranks)
        by_expert = expert_of.repeat_interleave(arriving, output_size=arrived.shape[0]).argsort(stable=True)
        of_experts = arriving.view(self.ranks, own).sum(dim=0)
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
    """The same with all experts on one device, and no exchange."""

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
