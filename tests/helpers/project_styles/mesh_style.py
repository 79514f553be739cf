"""Layers with expert parallelism on one axis of a mesh, on both, or between the collectives of sequence parallelism.

Layers with two hops that exchange counts, or have slots, are in `hops_style.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from moepass.models.reference.collectives import exchange_rows, gather_rows, scatter_sums, sum_over_ranks
from moepass.models.reference.grouped_experts import count_per_expert, undo_order
from tests.helpers.project_styles.exact_style import SplitOfStacks
from tests.helpers.project_styles.megatron_style import MaskedDispatch
from tests.helpers.project_styles.slots_style import IndexedSlots
from tests.helpers.project_styles.style_sizes import (
    BiasedExpert,
    GatedExpert,
    Router,
    StyleSizes,
    owned_experts,
    random_weight,
)


class OneAxisOfMesh(nn.Module):
    """Experts over the inner axis of a mesh [data parallel, expert parallel], and statistics over the outer one.

    The ranks of the outer axis have the same experts and different tokens. Each shifts its tokens by their mean over
    these ranks, as routers that balance load over all replicas do with their bias.
    """

    layer_type: type[nn.Module] = SplitOfStacks

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        ranks = dist.get_world_size(group)
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "ep"))
        self.replicas = ranks // 2
        self.outer_name = mesh.get_group("dp").group_name
        self.layer = self.layer_type(sizes, mesh.get_group("ep"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = sum_over_ranks(hidden.float().mean(dim=0), self.outer_name) / self.replicas
        outputs = self.layer(hidden - mean.to(hidden.dtype))
        largest = sum_over_ranks(outputs.float().square().mean(dim=0), self.outer_name) / self.replicas
        result: torch.Tensor = outputs / (1 + largest).to(outputs.dtype)
        return result


class OneAxisOfMeshWithMasks(OneAxisOfMesh):
    layer_type = MaskedDispatch


class SequenceParallel(nn.Module):
    """Each rank has a part of a sequence; a dense layer before the experts is cut by width.

    The order is AllGather, the rank's part of the width, ReduceScatter, experts on the rank's own tokens, AllGather;
    all over the group of the experts. A dense layer after the experts sees the whole sequence.
    """

    layer_type: type[nn.Module] = SplitOfStacks

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        self.ranks, self.group_name = dist.get_world_size(group), group.group_name
        rank, each = dist.get_rank(group), sizes.width // self.ranks
        # Every rank has its columns of one matrix.
        up = random_weight(sizes, 1001, sizes.width, sizes.hidden)[rank * each : (rank + 1) * each]
        down = random_weight(sizes, 1002, sizes.hidden, sizes.width)[:, rank * each : (rank + 1) * each]
        self.up, self.down = (nn.Parameter(shard.clone(), requires_grad=False) for shard in (up, down))
        self.layer = self.layer_type(sizes, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._dense(hidden)
        hidden = hidden + self.layer(hidden)
        return hidden + self._dense(hidden)

    def _dense(self, hidden: torch.Tensor) -> torch.Tensor:
        gathered = gather_rows(hidden, self.ranks, self.group_name)
        return scatter_sums(F.linear(F.silu(F.linear(gathered, self.up)), self.down), self.ranks, self.group_name)


class SequenceParallelBare(SequenceParallel):
    """A variant that exchanges the rows of ReduceScatter, with nothing between the collectives and the layer."""

    layer_type = MaskedDispatch

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(self._dense(hidden))
        return self._dense(outputs)


class TwoHops(nn.Module):
    """Machines times ranks of a machine: rows go to the right index within the machine first, then between machines."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        super().__init__()
        ranks, self.sizes = dist.get_world_size(group), sizes
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("between", "within"))
        self.within, self.between = (mesh.get_group(name).group_name for name in ("within", "between"))
        self.machines, self.own = ranks // 2, sizes.experts // ranks
        self.router = Router(sizes)
        owned = owned_experts(sizes, dist.get_rank(group), ranks)
        self.experts = nn.ModuleList(GatedExpert(sizes, number) for number in owned)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).topk(self.sizes.top_k, dim=-1)
        ids = chosen.reshape(-1)
        rows = hidden.repeat_interleave(self.sizes.top_k, dim=0)
        outputs = self._hop(rows, ids, 0).view(*chosen.shape, hidden.shape[1])
        result: torch.Tensor = (outputs * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)
        return result

    def _hop(self, rows: torch.Tensor, ids: torch.Tensor, hop: int) -> torch.Tensor:
        """Send rows to the ranks of one axis, pass them on, and return the results in their order."""
        if hop == 2:
            return self._run(rows, ids)
        rank = ids // self.own
        index, name, ranks = ((rank % 2, self.within, 2), (rank // 2, self.between, self.machines))[hop]
        order = index.argsort(stable=True)
        counts = count_per_expert(index, ranks)
        receive = exchange_rows(counts, [1] * ranks, [1] * ranks, name).tolist()
        send = counts.tolist()
        for size in (*send, *receive):
            torch._check(size >= 0)
        arrived, arrived_ids = (exchange_rows(values[order], send, receive, name) for values in (rows, ids))
        return undo_order(exchange_rows(self._hop(arrived, arrived_ids, hop + 1), receive, send, name), order)

    def _run(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        local = ids % self.own
        order = local.argsort(stable=True)
        sizes = count_per_expert(local, self.own).tolist()
        for size in sizes:
            torch._check(size >= 0)
        torch._check(sum(sizes) == rows.shape[0])
        parts = zip(self.experts, rows[order].split(sizes), strict=True)
        return undo_order(torch.cat([expert(rows_of_expert) for expert, rows_of_expert in parts]), order)


class CutExperts(SplitOfStacks):
    """Experts over one axis of a mesh, each cut by its width over the other; sums precede the combine.

    The ranks with parts of the same experts have the same tokens: those of the first of them.
    """

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("ep", "tp"))
        super().__init__(sizes, mesh.get_group("ep"))
        self.cut_name, self.is_first = mesh.get_group("tp").group_name, mesh.get_local_rank("tp") == 0
        rank, each = mesh.get_local_rank("tp"), sizes.width // 2
        columns = slice(rank * each, (rank + 1) * each)
        self.w1 = nn.Parameter(self.w1[:, columns].clone(), requires_grad=False)
        self.w3 = nn.Parameter(self.w3[:, columns].clone(), requires_grad=False)
        self.w2 = nn.Parameter(self.w2[:, :, columns].clone(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(sum_over_ranks(hidden * self.is_first, self.cut_name))

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(super()._run(rows, counts), self.cut_name)


class CutExpertsOfTokens(CutExperts):
    """A variant whose caller provides equal tokens to the ranks that share experts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return SplitOfStacks.forward(self, hidden)


class CutExpertsInOrder(CutExperts):
    """Partial results are added up in the order in which rows arrived, before the combine."""

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return SplitOfStacks._run(self, rows, counts)

    def exchange_back(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return super().exchange_back(sum_over_ranks(rows, self.cut_name), send, receive)


class CutSlots(IndexedSlots):
    """Experts with slots, cut by their width, whose results are added up at once for all experts of the rank."""

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(group) // 2, 2), mesh_dim_names=("ep", "tp"))
        super().__init__(sizes, mesh.get_group("ep"))
        self.cut_name = mesh.get_group("tp").group_name
        rank, each = mesh.get_local_rank("tp"), sizes.width // 2
        for expert in self.experts:
            assert isinstance(expert, BiasedExpert)
            expert.cut(slice(rank * each, (rank + 1) * each), has_bias=rank == 0)

    def compute(self, arrived: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(super().compute(arrived), self.cut_name)
