"""MoE layers of other projects' own packages, unmodified, over the group of all ranks.

Each is a module of this rank with `forward(hidden [tokens, HIDDEN]) -> [tokens, HIDDEN]`. Packages are imported when a
layer is built, because only `make test-packages` installs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 8, 2


def fill(layer: nn.Module) -> None:
    """Fill weights with random values, which differ by rank for experts and are equal for all others."""
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        is_expert = "expert" in name and "router" not in name
        generator = torch.Generator().manual_seed(1000 * number + (1 + dist.get_rank()) * is_expert)
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))
        return result


class BiasedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(rows)))
        return result


class DeepSpeedLayer(nn.Module):
    """`deepspeed.moe.layer.MoE` without random numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        import deepspeed.comm
        from deepspeed.moe.layer import MoE
        from deepspeed.utils import groups

        # DeepSpeed would compile an unused operator for AllReduces on a CPU, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # Test processes outlive their group.
        groups._EXPERT_PARALLEL_GROUP.clear()
        groups._EXPERT_DATA_PARALLEL_GROUP.clear()
        ranks = dist.get_world_size()
        self.moe = MoE(HIDDEN, BiasedMlp(), EXPERTS, ranks, use_rts=False, top2_2nd_expert_sampling=False, **options)
        self.moe.set_deepspeed_parallelism()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moe(hidden)[0]
        return result


class FairscaleLayer(nn.Module):
    """`fairscale.nn.moe.MOELayer` with its own gate, which draws random numbers in every run, or with `SlotGate`."""

    def __init__(self, own_gate: bool) -> None:
        super().__init__()
        from fairscale.nn.moe import MOELayer, Top2Gate

        owned = EXPERTS // dist.get_world_size()
        gate = Top2Gate(HIDDEN, EXPERTS) if own_gate else SlotGate()
        self.moe = MOELayer(gate, nn.ModuleList(GatedMlp() for _ in range(owned)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moe(hidden.view(len(self.moe.experts), -1, HIDDEN)).view(-1, HIDDEN)
        return result


class SlotGate(nn.Module):
    """A gate with the outputs of fairscale's `Top2Gate`, for the two largest experts."""

    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gates = torch.softmax(self.wg(rows), dim=1, dtype=torch.float)
        capacity = 2 * gates.shape[0] // EXPERTS
        weights, chosen = gates.topk(2, dim=1)
        combine = gates.new_zeros(gates.shape[0], EXPERTS, capacity)
        taken = torch.zeros(EXPERTS, dtype=torch.int64)
        for choice in range(2):
            mask = nn.functional.one_hot(chosen[:, choice], EXPERTS)
            location = torch.cumsum(mask, dim=0) - 1 + taken
            taken = taken + mask.sum(dim=0)
            mask = mask * (location < capacity)
            slot = (location * mask).sum(dim=1, keepdim=True) == torch.arange(capacity)
            combine = combine + (weights[:, choice : choice + 1] * mask).unsqueeze(2) * slot.unsqueeze(1)
        return gates.mean(), combine.to(rows.dtype), combine.bool()


class TorchtitanLayer(nn.Module):
    """`torchtitan.models.common.moe.MoE` with its AllToAll dispatcher, over a mesh."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        set_spmd_backend("default")
        ranks = dist.get_world_size()
        experts = GroupedExperts.Config(dim=HIDDEN, hidden_dim=WIDTH, num_experts=EXPERTS // ranks)
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
        gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
        self.moe = MoE.Config(
            num_experts=EXPERTS,
            routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
            router=TokenChoiceTopKRouter.Config(num_experts=EXPERTS, gate=gate, top_k=TOP_K),
        ).build()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        self.moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh["ep"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moe(hidden.unsqueeze(0)).squeeze(0)
        return result
