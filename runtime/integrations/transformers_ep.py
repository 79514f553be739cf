"""Expert parallelism of transformers with `ep_implementation="asyncep"`: ranks gather experts and keep their tokens.

    moepass.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="asyncep")
    )

This needs transformers 5.23 or newer, and `accelerate`, which `from_pretrained` requires. Each rank loads its own
experts. In eager mode a layer gathers all experts synchronously and runs its own forward on this rank's tokens, so the
results are bit-identical to a run on one process. In a captured graph the gather is one operator, which does not break
the graph; `backend="asyncep"` prefetches it.

If ranks share one batch (the `ep_size` ranks form the group of `tp_size`), every rank computes the whole batch. That is
correct but redundant; for throughput, give each rank its own batch.

transformers' style `grouped_gemm` needs a number of experts that is a multiple of the ranks. moepass's style does not;
set it for each expert tensor:

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
from moepass.passes.blocks.lower_complete_experts import COMPLETE_EXPERTS
from moepass.runtime.integrations.complete_experts import CompleteExperts

NAME = "asyncep"
UNEVEN_STYLE = "asyncep_grouped_gemm"

_MODULE = "transformers.distributed.expert_parallel"


def register_transformers() -> bool:
    """Register `ep_implementation="asyncep"` with transformers. Calling it twice does no harm.

    Returns False if transformers is not installed, or is older than 5.23 and takes no other implementations.
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
        """`grouped_gemm` for any number of experts; the last ranks hold fewer, as with `torch.chunk`."""

        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            complete = module._parameters.get(param)
            if complete is not None:
                sharded = distribute_tensor(complete, mesh, [self.placement], src_data_rank=None)
                module._parameters[param] = nn.Parameter(sharded, requires_grad=complete.requires_grad)

    theirs.ALL_PARALLEL_STYLES.register(UNEVEN_STYLE, UnevenShard(Shard(0), shards_expert_dim=True))


# The number of layers in each group so far. Ranks create their layers in the same order.
_layers_of_group: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class AsyncExperts:
    """An implementation of transformers' expert parallelism, one for each experts module.

    transformers creates it while weights are on the meta device, so it keeps names and sizes of `experts` and no
    tensors. Raises InputError if `experts` has no sharded tensors, or tensors with different numbers of experts.
    """

    needs_shared_batch = False

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        from torch.distributed.tensor import DTensor

        sharded: dict[str, Any] = {
            name: value for name, value in experts._parameters.items() if isinstance(value, DTensor)
        }
        counts = {int(value.shape[0]) for value in sharded.values()}
        if len(counts) != 1:
            raise InputError(
                f"{type(experts).__name__} has sharded tensors with the first dimensions {sorted(counts)}; the first "
                "dimension of every tensor must be the number of experts",
                name=type(experts).__name__,
                value=sorted(counts),
            )
        (count,) = counts
        group: ProcessGroup = ep_mesh.get_group()
        bounds = _chunk_bounds(count, group.size())
        expected = bounds[group.rank() + 1] - bounds[group.rank()]
        held = {name: value.to_local().shape[0] for name, value in sharded.items()}
        if set(held.values()) != {expected}:
            text = f"rank {group.rank()} holds {held} experts; of {count} it should have {expected}"
            raise InputError(text, rank=group.rank(), value=held, expected=expected)
        self.names = list(sharded)
        ordinal = _layers_of_group.get(group, 0)
        _layers_of_group[group] = ordinal + 1
        self.sharded = CompleteExperts(f"experts {ordinal}", group, bounds)
        self.experts = experts
        # The same layer with other parameters, set only during a call, so that its forward uses all experts.
        complete: Any = copy.copy(experts)
        complete._parameters = dict.fromkeys(experts._parameters)
        complete.num_experts = count
        complete._is_expert_parallel = False
        self.complete: nn.Module = complete

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums [tokens, hidden] of this rank's tokens, with global expert ids [tokens, k].

        Around this call transformers puts the local tensors [experts of this rank, ...] into the layer's parameters.
        """
        experts, complete, sharded = self.experts, self.complete, self.sharded
        if experts.training and torch.is_grad_enabled():
            raise InputError(
                f'ep_implementation="{NAME}" is for inference, but the model is in training mode with gradients on; '
                "call model.eval(), and run it under torch.no_grad() or torch.inference_mode()"
            )
        complete.training = experts.training  # does not read the old value, because Dynamo would guard on it
        # FSDP gathers parameters into new memory in every run.
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
    """Return the bounds of each rank's experts, cut as by `torch.chunk` and DTensor: only the last ranks have fewer."""
    most = -(-experts // ranks)
    return [min(rank * most, experts) for rank in range(ranks + 1)]
