"""Expert parallelism of transformers with `ep_implementation="asyncep"`: complete experts come, tokens stay.

    moepass.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="asyncep")
    )

Needs transformers 5.23 or newer, and `accelerate`, which `from_pretrained` asks for. Each rank loads its own experts.
In eager mode a layer gathers the complete ones synchronously before it runs them on this rank's own tokens, with the
layer's own forward, so that results are those of one process to the bit. Captured, the gather is one operator, which
breaks no graph; `backend="asyncep"` prefetches it.

Where ranks share one batch (the group of `ep_size` ranks is that of `tp_size`), every rank computes all of that batch.
That is right, and redundant; give each rank its own batch where throughput matters.

A number of experts that the ranks do not divide: transformers' style `grouped_gemm` refuses it, ours does not. Name it
for each expert tensor:

    ep_plan={"model.layers.*.mlp.experts.gate_up_proj": "asyncep_grouped_gemm", ...}
"""

from __future__ import annotations

import copy
import importlib
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from moepass.models.errors import InputError
from moepass.runtime.integrations.complete_experts import COMPLETE_EXPERTS, CompleteExperts

NAME = "asyncep"
UNEVEN_STYLE = "asyncep_grouped_gemm"

_MODULE = "transformers.distributed.expert_parallel"


def register_transformers() -> bool:
    """Make `ep_implementation="asyncep"` known to transformers; again does no harm.

    False where transformers is too old to take implementations of others (before 5.23), or absent.
    """
    try:
        theirs = importlib.import_module(_MODULE)
    except ImportError:
        return False
    if not hasattr(theirs, "EPImplementationInterface"):
        return False
    theirs.EPImplementationInterface.register(NAME, AsyncExperts)
    _register_uneven_style(theirs)
    return True


def _register_uneven_style(theirs: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    class UnevenShard(theirs.MoEParamShard):  # type: ignore[misc]
        """`grouped_gemm` for any number of experts; the last ranks hold fewer, as `torch.chunk` would give them."""

        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            whole = module._parameters.get(param)
            if whole is not None:
                sharded = distribute_tensor(whole, mesh, [self.placement], src_data_rank=None)
                module._parameters[param] = nn.Parameter(sharded, requires_grad=whole.requires_grad)

    theirs.ALL_PARALLEL_STYLES.register(UNEVEN_STYLE, UnevenShard(Shard(0), shards_expert_dim=True))


# How many layers of a group there are so far: ranks build their layers in the same order.
_layers_of_group: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class AsyncExperts:
    """An implementation of transformers' expert parallelism, one for each experts module: see the module's text."""

    needs_shared_batch = False

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        """Called while weights are on meta still: it keeps names and sizes, no tensor of `experts`.

        Raises InputError where `experts` has no sharded tensors, or differently sharded ones.
        """
        from torch.distributed.tensor import DTensor

        sharded: dict[str, Any] = {
            name: value for name, value in experts._parameters.items() if isinstance(value, DTensor)
        }
        counts = {int(value.shape[0]) for value in sharded.values()}
        if len(counts) != 1:
            raise InputError(
                f"{type(experts).__name__} has sharded tensors with {sorted(counts)} experts; all must have one number "
                "of experts as their first size",
                name=type(experts).__name__,
                value=sorted(counts),
            )
        (count,) = counts
        group: ProcessGroup = ep_mesh.get_group()
        bounds = _chunk_bounds(count, group.size())
        own = bounds[group.rank() + 1] - bounds[group.rank()]
        held = {name: value.to_local().shape[0] for name, value in sharded.items()}
        if set(held.values()) != {own}:
            raise InputError(
                f"rank {group.rank()} holds {held} experts; of {count} it should have {own}",
                rank=group.rank(),
                value=held,
                expected=own,
            )
        self.names = list(sharded)
        ordinal = _layers_of_group.get(group, 0)
        _layers_of_group[group] = ordinal + 1
        self.sharded = CompleteExperts(f"experts {ordinal}", group, bounds)
        self.experts = experts
        # The same layer with parameters of its own, which are there during a call only: its forward finds all experts.
        complete: Any = copy.copy(experts)
        complete._parameters = dict.fromkeys(experts._parameters)
        complete.num_experts = count
        complete._is_expert_parallel = False
        self.complete: nn.Module = complete

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sums [tokens, hidden] of this rank's tokens; `top_k_index` [tokens, k] are global expert ids.

        Around this call transformers puts the local tensors [own experts, ...] into the parameters of the layer.
        """
        experts, complete, sharded = self.experts, self.complete, self.sharded
        if experts.training and torch.is_grad_enabled():
            raise InputError(
                f'ep_implementation="{NAME}" is for inference, but the model is in training mode with gradients on; '
                "call model.eval(), and run it under torch.no_grad() or torch.inference_mode()"
            )
        complete.training = experts.training  # without a look at the old value, which Dynamo would guard on
        # FSDP brings parameters together in other memory in every run.
        stay = not getattr(experts, "_is_fsdp_managed_module", False)
        parts = [experts._parameters[name] for name in self.names]
        tensors = COMPLETE_EXPERTS(sharded.handle, parts, sharded.bounds, sharded.group_name, stay)
        for name, value in experts._parameters.items():
            complete._parameters[name] = value
        for name, tensor in zip(self.names, tensors, strict=True):
            complete._parameters[name] = tensor
        try:
            output: torch.Tensor = complete.forward(hidden_states, top_k_index, top_k_weights)
            return output
        finally:
            for name in experts._parameters:
                complete._parameters[name] = None


def _chunk_bounds(experts: int, ranks: int) -> list[int]:
    """The experts of each rank as `torch.chunk` and DTensor cut them: all but the last ranks have the same number."""
    most = -(-experts // ranks)
    return [min(rank * most, experts) for rank in range(ranks + 1)]
