"""A small model and a machine for tests of the planner."""

from __future__ import annotations

import copy
import dataclasses

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moepass.passes.machine.hardware import Figure, Hardware, TransferLink
from moepass.runtime.profiles.hardware_profiles import load_hardware

# Sequences of a step, and tokens of each.
TOKENS = (2, 32)


def planned_model(experts: tuple[int, ...] = (8, 8, 8, 8)) -> PreTrainedModel:
    """Return a model whose layers have these numbers of experts; its config says 8 for each."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=len(experts),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).eval()
    for layer, count in zip(model.model.layers, experts, strict=True):
        if count != config.num_experts:
            changed = copy.deepcopy(config)
            changed.num_experts = count
            changed._experts_implementation = "grouped_mm"
            layer.mlp = Qwen3MoeSparseMoeBlock(changed).eval()
    return model


def planned_machine(host_bytes_per_s: float = 2e7) -> Hardware:
    """Return a machine with a slow host link, on which planning has something to decide."""
    link = TransferLink(Figure(host_bytes_per_s, "user"), Figure(1e-6, "user"))
    flops = {"fp32": Figure(1e10, "user")}
    return dataclasses.replace(load_hardware("h100-80g"), name="made up", flops=flops, processors=None, host=link)
