"""Tiny configurations of well-known mixture-of-experts families: the structure of the family, a thousandth of its size.

Widths that reach a grouped GEMM are multiples of 16, so that a bfloat16 row is a multiple of 16 bytes long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
)


@dataclass(frozen=True)
class TinyFamily:
    """One family: the Transformers classes by name and the keyword arguments of a tiny configuration."""

    model_class: str
    config_class: str
    config: Mapping[str, Any]


def _family(model_class: str, config_class: str, **config: Any) -> TinyFamily:
    return TinyFamily(model_class, config_class, MappingProxyType({**_BASE, **config}))


# One family for each way in which experts are stored and computed: single experts, transposed stacks with biases,
# stacks, a shared expert and router weights in float32, and a batch for each expert.
EXPERT_KINDS = ("qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3", "llama4")

TINY_FAMILIES: Mapping[str, TinyFamily] = MappingProxyType(
    {
        "qwen3_moe": _family(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            head_dim=16,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=8,
            norm_topk_prob=True,
        ),
        # A dense first layer and, in each expert layer, a gated shared expert; biases on q, k and v.
        "qwen2_moe": _family(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            num_experts=8,
            norm_topk_prob=False,
            qkv_bias=True,
            mlp_only_layers=[0],
        ),
        "mixtral": _family(
            "MixtralForCausalLM", "MixtralConfig", intermediate_size=32, num_local_experts=8, sliding_window=None
        ),
        "olmoe": _family(
            "OlmoeForCausalLM", "OlmoeConfig", intermediate_size=32, num_experts=8, norm_topk_prob=False, clip_qkv=None
        ),
        # Latent attention, a dense first layer, a shared expert, sigmoid routing limited to 2 of 4 groups of experts.
        "deepseek_v3": _family(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            num_key_value_heads=4,
            intermediate_size=64,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        # Alternating sliding and full attention with sinks; biases in attention, router and experts.
        "gpt_oss": _family(
            "GptOssForCausalLM",
            "GptOssConfig",
            num_hidden_layers=4,
            head_dim=16,
            intermediate_size=32,
            num_local_experts=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "glm4_moe": _family(
            "Glm4MoeForCausalLM",
            "Glm4MoeConfig",
            head_dim=16,
            intermediate_size=64,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
        "phimoe": _family(
            "PhimoeForCausalLM",
            "PhimoeConfig",
            intermediate_size=32,
            num_local_experts=8,
            attention_bias=True,
            lm_head_bias=True,
            sliding_window=None,
        ),
        # Multipliers away from 1, so that one left out or applied twice changes the result.
        "granitemoe": _family(
            "GraniteMoeForCausalLM",
            "GraniteMoeConfig",
            intermediate_size=32,
            num_local_experts=8,
            embedding_multiplier=2.0,
            logits_scaling=0.5,
            residual_multiplier=0.75,
            attention_multiplier=0.25,
        ),
        # mamba + dense, mamba + experts, attention + dense, mamba + experts.
        "jamba": _family(
            "JambaForCausalLM",
            "JambaConfig",
            num_hidden_layers=4,
            intermediate_size=32,
            num_experts=8,
            attn_layer_period=4,
            attn_layer_offset=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,  # the family's own size: with 8 float32 itself is 1e-5 off
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
            # Transformers takes this scan under torch.compile only; it adds in another order than the eager loop does.
            use_associative_scan=False,
        ),
        # Three layers of gated linear attention, then one of full attention; experts and a shared expert in each.
        "qwen3_next": _family(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            num_hidden_layers=4,
            head_dim=16,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=8,
            # The family's own sizes: keys of 16 are so much alike that float32 itself is 3e-5 off.
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
        # Dense and expert layers in turn; three layers of chunked attention, then one of full attention without rope.
        "llama4": _family(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            num_hidden_layers=4,
            head_dim=16,
            intermediate_size=32,
            intermediate_size_mlp=64,
            num_local_experts=8,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            no_rope_layer_interval=4,
            attention_chunk_size=8,
            floor_scale=8,
        ),
    }
)
