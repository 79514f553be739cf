"""Whole models of a known geometry with random weights, and their bytes on the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.on_gpu.target import Target
from benchmarks.parts.causal_attention import CAUSAL, causal_attention
from moepass.models.formulas.layers import layer_parameters, model_parameters
from moepass.models.formulas.memory import bank_bytes, element_bytes
from moepass.models.sizes.families import from_config
from moepass.passes.planner.strategies import peak_activation_bytes

# Random attention makes the tokens of a sequence alike and routes them to one expert, so it is scaled down.
_ATTENTION_SCALE = 0.1
# As large as the outputs of norms, so that a layer changes its input little, as in trained models. With random weights
# in bfloat16, a tenth of the tokens is close to a tie of two experts, which rounding decides.
_EMBEDDING_SCALE = 50


def fitting_layers(config: PreTrainedConfig, tokens: int, slots: int, device_bytes: float, host_bytes: float) -> int:
    """Return how many layers of `config` fit into memory, with experts both resident and streamed; 0 for none.

    The device holds all weights once, slots, and twice the predicted activations of `tokens`. Host memory holds experts
    in pinned memory, whose size torch rounds up to a power of two, and all weights once more for accelerate.
    """
    architecture = from_config(config)
    layer, dtype = architecture.typical_moe_layer, architecture.dtype
    assert layer.experts is not None
    bank = bank_bytes(layer.experts, architecture.hidden, dtype)
    of_layer = layer_parameters(layer, architecture.hidden) * element_bytes(dtype)
    dense_bytes = model_parameters(architecture) * element_bytes(dtype) - len(architecture.layers) * of_layer
    fixed_bytes = dense_bytes + slots * bank + 2 * peak_activation_bytes(architecture, tokens, dtype)
    on_device = (device_bytes - fixed_bytes) / of_layer
    in_host = (host_bytes - dense_bytes) / (of_layer + (1 << (bank - 1).bit_length()))
    return max(0, int(min(on_device, in_host, len(architecture.layers))))


def build_model(config: PreTrainedConfig, target: Target) -> PreTrainedModel:
    """Return the model of `config` on the device, with grouped GEMMs and random weights from transformers."""
    causal_attention()
    torch.manual_seed(0)
    with target.device:
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_ATTENTION_SCALE)
    model.model.embed_tokens.weight.mul_(_EMBEDDING_SCALE)
    empty = [name for name, value in model.named_parameters() if value.dim() > 1 and not bool(value.any())]
    assert not empty, f"transformers left {empty} without values"
    model.set_experts_implementation("grouped_mm")
    model.set_attn_implementation(CAUSAL)
    built: PreTrainedModel = model
    return built


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model with separate parameters and buffers in the same memory."""
    memo: dict[int, Any] = {id(value): nn.Parameter(value.detach(), False) for value in model.parameters()}
    memo.update({id(value): value.detach() for value in model.buffers()})
    return copy.deepcopy(model, memo)


def held_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of the parameters and buffers of `model` on `device`, counting shared memory once."""
    tensors = [value for value in (*model.parameters(), *model.buffers()) if value.device.type == device.type]
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}.values())


def token_ids(config: PreTrainedConfig, count: int, length: int, device: torch.device) -> torch.Tensor:
    """Return `count` sequences of `length` random tokens; captures keep both sizes symbolic, except a count of 1."""
    generator = torch.Generator(device).manual_seed(length)
    ids = torch.randint(0, config.vocab_size, (count, length), generator=generator, device=device)
    for dim, size in enumerate(ids.shape):
        if size > 1:
            torch._dynamo.mark_dynamic(ids, dim)
    return ids
