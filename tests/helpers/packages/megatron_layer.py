"""Megatron-Core's own MoE layer on a CPU, as it comes, and with what Dynamo needs to capture it in one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.packages.package_layers import EXPERTS, HIDDEN, TOP_K, WIDTH


class NoStream:
    """A replacement for CUDA streams and events on a CPU, where work is done when it is issued."""

    def wait_stream(self, other: NoStream) -> None: ...

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None: ...


def _as_if_moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes as Megatron-Core converts them on a GPU: its exchanges take numpy arrays, not tensors."""
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if not torch.is_tensor(tensor) or not as_numpy:
        return tensor
    sizes = tensor.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return sizes


def _gathered(tokens: torch.Tensor, use_global_buffer: bool = False, **options: Any) -> torch.Tensor:
    """Gather as Megatron-Core does, but not into its buffer for the whole process, which outlives the run."""
    from megatron.core.tensor_parallel import mappings

    gathered: torch.Tensor = mappings.gather_from_sequence_parallel_region(tokens, **options)
    return gathered


class Order(list[int]):
    """A constant order of chunks, because `tolist` of a tensor returns numbers that Dynamo does not know."""

    def tolist(self) -> list[int]:
        return list(self)


@contextlib.contextmanager
def stand_in_for_cuda() -> Iterator[None]:
    """Replace the parts of `torch.cuda` that Megatron-Core uses on every machine: the current device and streams."""
    # Dynamo looks up its rules for torch's functions by name once; the replacements must be traced as plain functions.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    stream = NoStream()
    with mock.patch.multiple(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        Stream=NoStream,
        current_stream=lambda device=None: stream,
        stream=lambda stream: contextlib.nullcontext(),
    ):
        yield


class MegatronLayer(nn.Module):
    """`megatron.core.transformer.moe.moe_layer.MoELayer` with an MLP for each expert.

    Build and run it under `stand_in_for_cuda`.

    Args:
        dispatcher: The type of the token dispatcher.
        for_capture: Whether to make the layer one graph. Exchanges then take lists of sizes, orders of chunks are
            lists, AllGathers allocate their own memory, and the dispatcher's records of a run are cleared after it.
            Recorded sizes would be results of the graph, and the exchange of counts could not be removed from it.
    """

    def __init__(self, dispatcher: str, for_capture: bool) -> None:
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.tensor_parallel import mappings
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        # Megatron-Core reads this name, but does not define it without Transformer Engine.
        moe_utils.te_general_gemm = None
        token_dispatcher.maybe_move_tensor_to_cpu = _as_list if for_capture else _as_if_moved
        gather = _gathered if for_capture else mappings.gather_from_sequence_parallel_region
        token_dispatcher.gather_from_sequence_parallel_region = gather
        # Test processes outlive their group.
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_router_load_balancing_type="none",
            ffn_hidden_size=WIDTH,
            moe_ffn_hidden_size=WIDTH,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            moe_token_dispatcher_type=dispatcher,
            expert_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
        self.moe = spec.module(config, spec.submodules)
        self.for_capture = for_capture
        moe_dispatcher = self.moe.token_dispatcher
        for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
            if for_capture and hasattr(moe_dispatcher, name):
                setattr(moe_dispatcher, name, Order(getattr(moe_dispatcher, name).tolist()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moe(hidden.unsqueeze(1))[0].squeeze(1)
        if self.for_capture:
            token_dispatcher = self.moe.token_dispatcher
            noted = ("probs", "tokens_per_expert", "hidden_shape_before_permute", "local_map", "local_probs")
            orders = ("reversed_local_input_permutation_mapping",)
            for name in (*token_dispatcher.cudagraph_attrs, "d2h_event", *noted, *orders):
                if hasattr(token_dispatcher, name):
                    setattr(token_dispatcher, name, None)
        return result
