"""Layers with expert parallelism on one axis of a mesh, or between the collectives of sequence parallelism.

Experts over both axes of a mesh, by two hops or cut by their width, are refused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from moepass.models.reference.collectives import gather_rows, scatter_sums, sum_over_ranks
from tests.helpers.project_styles.exact_style import SplitOfStacks
from tests.helpers.project_styles.megatron_style import MaskedDispatch
from tests.helpers.project_styles.slots_style import EqualAllToAll, IndexedSlots
from tests.helpers.project_styles.style_sizes import StyleSizes, random_weight


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


class SlotsInTwoHops(IndexedSlots):
    """Slots that travel between machines first, to the rank with the same index there, and then within the machine."""

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


def _exchanged(group: ProcessGroup, slots: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = EqualAllToAll.apply(group, slots)  # type: ignore[no-untyped-call]
    return result


class ExpertsCutByWidth(SplitOfStacks):
    """Experts over one axis of a mesh, each cut by its width over the other; sums precede the AllToAll back.

    The ranks with parts of the same experts have the same tokens: those of the first of them.
    """

    def __init__(self, sizes: StyleSizes, group: ProcessGroup) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(group) // 2, 2), mesh_dim_names=("ep", "tp"))
        super().__init__(sizes, mesh.get_group("ep"))
        rank, each = mesh.get_local_rank("tp"), sizes.width // 2
        self.cut_name, self.is_first = mesh.get_group("tp").group_name, rank == 0
        columns = slice(rank * each, (rank + 1) * each)
        self.w1 = nn.Parameter(self.w1[:, columns].clone(), requires_grad=False)
        self.w3 = nn.Parameter(self.w3[:, columns].clone(), requires_grad=False)
        self.w2 = nn.Parameter(self.w2[:, :, columns].clone(), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(sum_over_ranks(hidden * self.is_first, self.cut_name))

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(super()._run(rows, counts), self.cut_name)
