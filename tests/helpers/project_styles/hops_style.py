"""Rows that reach their experts in two hops, over the axes of a mesh [machines, ranks of a machine].

The first hop is between machines, to the rank with the same index in the other machine, as in DeepEP; or it is within
the machine, so that each rank sends to one rank of every other machine, as in tutel and HetuMoE for slots.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows
from moepass.models.reference.grouped_experts import grouped_gemm
from tests.helpers.project_styles.slots_style import EqualAllToAll, IndexedSlots
from tests.helpers.project_styles.style_sizes import (
    Router,
    StyleSizes,
    owned_experts,
    stacked_gated_experts,
)


class SlotsBetweenMachinesFirst(IndexedSlots):
    """Every rank sends all slots of a machine to the rank with its index in that machine."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__(sizes, group)
        mesh = init_device_mesh("cpu", (self.ranks // 2, 2), mesh_dim_names=("between", "within"))
        self.between, self.within = mesh.get_group("between"), mesh.get_group("within")
        self.machines = self.ranks // 2

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        owned, (capacity, width) = len(self.experts), slots.shape[1:]
        arrived = _exchanged(self.between, slots).view(self.machines, 2, owned, capacity, width)
        passed = _exchanged(self.within, arrived.transpose(0, 1).reshape(self.ranks * owned, capacity, width))
        outputs = self.compute(passed.view(2 * self.machines, owned, capacity, width))
        returned = _exchanged(self.within, outputs.reshape(self.ranks * owned, capacity, width))
        returned = returned.view(2, self.machines, owned, capacity, width).transpose(0, 1)
        return _exchanged(self.between, returned.reshape(self.ranks * owned, capacity, width))


class SlotsWithinMachineFirst(SlotsBetweenMachinesFirst):
    """Every rank collects the slots that its machine sends to its index in other machines, expert by expert."""

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        owned, (capacity, width) = len(self.experts), slots.shape[1:]
        shape = (self.machines, 2, owned, capacity, width)
        collected = _exchanged(self.within, slots.view(shape).transpose(0, 1).reshape(-1, capacity, width))
        # [2 from, machines, own, ..] to [machines, own, 2 from, ..]
        collected = collected.view(2, self.machines, owned, capacity, width).permute(1, 2, 0, 3, 4)
        arrived = _exchanged(self.between, collected.reshape(-1, capacity, width))
        arrived = arrived.view(self.machines, owned, 2, capacity, width).permute(0, 2, 1, 3, 4)
        outputs = self.compute(arrived.reshape(self.ranks, owned, capacity, width)).view(shape)
        returned = _exchanged(self.between, outputs.permute(0, 2, 1, 3, 4).reshape(-1, capacity, width))
        returned = returned.view(self.machines, owned, 2, capacity, width).permute(2, 0, 1, 3, 4)
        returned = _exchanged(self.within, returned.reshape(-1, capacity, width))
        return returned.view(2, self.machines, owned, capacity, width).transpose(0, 1).reshape(slots.shape)


def _exchanged(group: ProcessGroup, slots: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = EqualAllToAll.apply(group, slots)  # type: ignore[no-untyped-call]
    return result


class ExactBetweenMachinesFirst(nn.Module):
    """Exact sizes: on both hops, ranks exchange the number of rows of each expert from each rank."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.sizes, self.ranks = sizes, dist.get_world_size(group)
        mesh = init_device_mesh("cpu", (self.ranks // 2, 2), mesh_dim_names=("between", "within"))
        self.between, self.within = (mesh.get_group(name).group_name for name in ("between", "within"))
        self.machines, self.own = self.ranks // 2, sizes.experts // self.ranks
        self.router = Router(sizes)
        owned = owned_experts(sizes, dist.get_rank(group), self.ranks)
        self.w1, self.w3, self.w2 = stacked_gated_experts(sizes, owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, chosen = torch.topk(self.router(hidden), self.sizes.top_k, dim=1)
        ids = self._numbers(chosen.view(-1))
        order = torch.argsort(ids, stable=True)
        rows = hidden.index_select(0, order // self.sizes.top_k)
        returned = self._exchange(rows, _counted(ids, self.sizes.experts))
        weighed = (returned.float() * scores.view(-1)[order].unsqueeze(-1)).to(hidden.dtype)
        token = (order // self.sizes.top_k).unsqueeze(-1).expand(-1, hidden.shape[1])
        return torch.zeros_like(hidden).scatter_add(0, token, weighed)

    def _numbers(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the order in which the rows of `experts` are sent."""
        return experts

    def _exchange(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Exchange `rows` in that order, of which each number has `counts`."""
        experts_of_machine = 2 * self.own
        arriving = exchange_rows(counts, *_equal(experts_of_machine, self.machines), self.between)
        send, receive = self._sizes(counts, self.machines), self._sizes(arriving, self.machines)
        arrived = exchange_rows(rows, send, receive, self.between)
        returned = self._pass_on(arrived, arriving)
        return exchange_rows(returned, receive, send, self.between)

    def _pass_on(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Pass on `rows` of all machines, sorted by expert in each, with `counts` [machines, ranks, own experts]."""
        # By rank, then by machine, then by expert.
        position = _places(counts, rows.shape[0], torch.arange(2 * self.own, device=rows.device) // self.own)
        passed = counts.view(self.machines, 2, self.own).transpose(0, 1).reshape(-1)
        arriving = exchange_rows(passed, *_equal(self.machines * self.own, 2), self.within)
        send, receive = self._sizes(passed, 2), self._sizes(arriving, 2)
        arrived = exchange_rows(rows[position], send, receive, self.within)
        outputs = self._run(arrived, arriving)
        returned = exchange_rows(outputs, receive, send, self.within)
        unordered = torch.empty_like(returned)
        unordered[position] = returned
        return unordered

    def _sizes(self, counts: torch.Tensor, ranks: int) -> list[int]:
        sizes: list[int] = counts.view(ranks, -1).sum(dim=1).tolist()
        for size in sizes:
            torch._check(size >= 0)
        return sizes

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run the experts on `rows`, with `counts` [.., own experts]."""
        by_expert = _places(counts, rows.shape[0], torch.arange(self.own, device=rows.device))
        ends = counts.view(-1, self.own).sum(dim=0).cumsum(0).to(torch.int32)
        ordered = rows[by_expert]
        gate = grouped_gemm(ordered, self.w1.transpose(-2, -1), ends)
        up = grouped_gemm(ordered, self.w3.transpose(-2, -1), ends)
        outputs = grouped_gemm(F.silu(gate) * up, self.w2.transpose(-2, -1), ends)
        unordered = torch.empty_like(outputs)
        unordered[by_expert] = outputs
        return unordered


class ExactByExpert(ExactBetweenMachinesFirst):
    """A variant that sorts the rows of the second hop by expert, independent of the machine that they come from."""

    def _pass_on(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        every = torch.arange(2 * self.own, device=rows.device)
        position = _places(counts, rows.shape[0], every)
        passed = counts.view(self.machines, 2 * self.own).sum(dim=0)
        arriving = exchange_rows(passed, *_equal(self.own, 2), self.within)
        send, receive = self._sizes(passed, 2), self._sizes(arriving, 2)
        outputs = self._run(exchange_rows(rows[position], send, receive, self.within), arriving)
        returned = exchange_rows(outputs, receive, send, self.within)
        unordered = torch.empty_like(returned)
        unordered[position] = returned
        return unordered


class ExactWithinMachineFirst(ExactBetweenMachinesFirst):
    """Rows are first sent to the right index within the machine: they are sorted by index, then by machine."""

    def _numbers(self, experts: torch.Tensor) -> torch.Tensor:
        rank, expert = experts // self.own, experts % self.own
        return ((rank % 2) * self.machines + rank // 2) * self.own + expert

    def _exchange(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        arriving = exchange_rows(counts, *_equal(self.machines * self.own, 2), self.within)
        send, receive = self._sizes(counts, 2), self._sizes(arriving, 2)
        arrived = exchange_rows(rows, send, receive, self.within)
        every = torch.arange(self.machines * self.own, device=rows.device)
        position = _places(arriving, arrived.shape[0], every // self.own)
        passed = arriving.view(2, self.machines, self.own).transpose(0, 1).reshape(-1)
        here = exchange_rows(passed, *_equal(2 * self.own, self.machines), self.between)
        onward, comes = self._sizes(passed, self.machines), self._sizes(here, self.machines)
        outputs = self._run(exchange_rows(arrived[position], onward, comes, self.between), here)
        returned = exchange_rows(outputs, comes, onward, self.between)
        unordered = torch.empty_like(returned)
        unordered[position] = returned
        return exchange_rows(unordered, receive, send, self.within)


def _counted(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.histc(ids.float(), experts, 0, experts).long()


def _equal(each: int, ranks: int) -> tuple[list[int], list[int]]:
    return [each] * ranks, [each] * ranks


def _places(counts: torch.Tensor, rows: int, keys: torch.Tensor) -> torch.Tensor:
    """Return the positions of rows sorted by key, if `counts` [.., keys] of them are stored one after the other."""
    of_each = keys.repeat(counts.numel() // keys.numel()).repeat_interleave(counts.reshape(-1), output_size=rows)
    return of_each.argsort(stable=True)
