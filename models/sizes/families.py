"""Sizes from configurations of transformers: one reader for each family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moepass.models.errors import InputError, one_of
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Latent, Layer, short_dtype
from moepass.models.sizes.weight_formats import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    SHARED_EXPERTS,
    WeightFormat,
    stored_format,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def from_config(config: PreTrainedConfig, *, name: str | None = None, dtype: str | None = None) -> Architecture:
    """Return the sizes of a transformers configuration; of a multimodal model, the text part is read.

    `name` is by default the model type, and `dtype` the config's dtype (or bf16). Raises InputError if the family is
    not in `FAMILIES`, or if its config lacks attributes or has numbers that describe no layers.
    """
    text = config.get_text_config()
    family = FAMILIES.get(str(text.model_type))
    if family is None:
        message = f"the sizes of model_type {text.model_type!r} are not known; moepass knows {one_of(FAMILIES)}"
        raise InputError(message, name="model_type", value=text.model_type, expected=tuple(FAMILIES))
    try:
        layers = tuple(family(text, index) for index in range(text.num_hidden_layers))
        stored_dtype = short_dtype(getattr(text, "dtype", None) or "bf16")
        stored, unknown_storage = _stored(config, layers, stored_dtype)
        return Architecture(
            name=name or str(text.model_type),
            model_type=str(text.model_type),
            hidden=text.hidden_size,
            vocab=text.vocab_size,
            dtype=short_dtype(dtype) if dtype else stored_dtype,
            layers=layers,
            tied_embeddings=bool(text.tie_word_embeddings),
            other_parameters=_outer_parameters(text),
            stored=stored,
            unknown_storage=unknown_storage,
        )
    except InputError:
        raise
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        problem = "is incomplete" if isinstance(error, AttributeError) else "does not fit together"
        message = f"the config of model_type {text.model_type!r} {problem}: {error}"
        raise InputError(message, name="model_type", value=text.model_type) from error


def _stored(config: Any, layers: Sequence[Layer], dtype: str) -> tuple[WeightFormat | None, str]:
    section = config if getattr(config, "quantization_config", None) is not None else config.get_text_config()
    stored, note = stored_format(section, [_parts(layer) for layer in layers], dtype)
    is_plain = all(
        layer.attention.kind not in ("linear", "state_space") and not (layer.experts and layer.experts.shared_gate)
        for layer in layers
    )
    if stored is not None and stored.parts != (EXPERTS,) and not is_plain:
        return None, f"moepass does not know which matrices of {config.model_type!r} checkpoints are in {stored.name}"
    return stored, note


def _parts(layer: Layer) -> tuple[str, ...]:
    if layer.experts is None:
        return ATTENTION, DENSE_MLP
    return (ATTENTION, EXPERTS, SHARED_EXPERTS) if layer.experts.shared_width else (ATTENTION, EXPERTS)


def _outer_parameters(config: Any) -> int:
    norm = (2 if config.model_type == "phimoe" else 1) * config.hidden_size
    return int(norm + config.vocab_size * bool(getattr(config, "lm_head_bias", False)))


def _heads(config: Any, *, bias: str = "qkvo", norms: int = 0, **fields: Any) -> Attention:
    """Return softmax attention with the usual attribute names. `bias` lists the projections that can have a bias."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim, "o": config.hidden_size}
    if fields.get("output_gate"):
        widths["q"] *= 2
    wanted = bool(getattr(config, "qkv_bias" if config.model_type == "qwen2_moe" else "attention_bias", False))
    biases = sum(widths[letter] for letter in bias) if wanted else 0
    return Attention(
        **{"kind": "full", **fields},
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        other_parameters=biases + norms,
    )


def _windowed(window: int | None) -> dict[str, Any]:
    return {"kind": "sliding", "window": window} if window else {}


def _windowed_layer(config: Any, index: int) -> dict[str, Any]:
    return _windowed(config.sliding_window if config.layer_types[index] == "sliding_attention" else None)


def _layer(config: Any, attention: Attention, experts: Experts | None, dense: int | None = None) -> Layer:
    # Two norms with a scale each; phimoe's have a shift too.
    norms = (4 if config.model_type == "phimoe" else 2) * config.hidden_size
    return Layer(attention, experts, None if experts else dense, norms)


def _is_sparse(config: Any, index: int) -> bool:
    is_step = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    return is_step and index not in config.mlp_only_layers


def _qwen3_moe(config: Any, index: int) -> Layer:
    attention = _heads(config, norms=2 * config.head_dim, **_windowed(config.sliding_window))
    experts = Experts(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    return _layer(config, attention, experts if _is_sparse(config, index) else None, config.intermediate_size)


def _qwen2_moe(config: Any, index: int) -> Layer:
    attention = _heads(config, bias="qkv", **_windowed_layer(config, index))
    experts = _shared_qwen_experts(config) if _is_sparse(config, index) else None
    return _layer(config, attention, experts, config.intermediate_size)


def _shared_qwen_experts(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def _qwen3_next(config: Any, index: int) -> Layer:
    if config.layer_types[index] == "linear_attention":
        heads = config.linear_num_value_heads
        attention = Attention(
            kind="linear",
            heads=heads,
            kv_heads=config.linear_num_key_heads,
            head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            convolution=config.linear_conv_kernel_dim,
            # A decay and a time step bias per head, the norm of the output.
            other_parameters=2 * heads + config.linear_value_head_dim,
        )
    else:
        attention = _heads(config, norms=2 * config.head_dim, output_gate=True)
    experts = _shared_qwen_experts(config) if _is_sparse(config, index) else None
    return _layer(config, attention, experts, config.intermediate_size)


def _mixtral(config: Any, index: int) -> Layer:
    """Read Mixtral, and families of the same layout: PhiMoE and Granite."""
    attention = _heads(config, **_windowed(getattr(config, "sliding_window", None)))
    experts = Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return _layer(config, attention, experts)


def _olmoe(config: Any, index: int) -> Layer:
    plain = _heads(config)
    attention = _heads(config, norms=plain.query_width + plain.key_width)
    return _layer(config, attention, Experts(config.num_experts, config.num_experts_per_tok, config.intermediate_size))


def _deepseek_v3(config: Any, index: int) -> Layer:
    latent = Latent(config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim)
    compressed = (latent.query_rank or 0) + latent.kv_rank
    biases = compressed + latent.position_dim + config.hidden_size
    attention = Attention(
        kind="full",
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
        value_head_dim=config.v_head_dim,
        latent=latent,
        other_parameters=compressed + (biases if config.attention_bias else 0),
    )
    return _after_dense_layers(config, index, attention)


def _glm4_moe(config: Any, index: int) -> Layer:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = _heads(config, bias="qkv", norms=2 * head_dim if config.use_qk_norm else 0)
    return _after_dense_layers(config, index, attention)


def _after_dense_layers(config: Any, index: int, attention: Attention) -> Layer:
    experts = Experts(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.moe_intermediate_size * config.n_shared_experts,
    )
    is_dense = index < config.first_k_dense_replace
    return _layer(config, attention, None if is_dense else experts, config.intermediate_size)


def _gpt_oss(config: Any, index: int) -> Layer:
    attention = _heads(config, norms=config.num_attention_heads, **_windowed_layer(config, index))
    experts = Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, bias=True, router_bias=True
    )
    return _layer(config, attention, experts)


def _jamba(config: Any, index: int) -> Layer:
    if config.layers_block_type[index] == "mamba":
        inner, states, rank = config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_dt_rank
        biases = inner if config.mamba_conv_bias else 0
        biases += 2 * inner + config.hidden_size if config.mamba_proj_bias else 0
        attention = Attention(
            kind="state_space",
            heads=inner,
            kv_heads=inner,
            head_dim=states,
            value_head_dim=1,
            convolution=config.mamba_d_conv,
            time_step_rank=rank,
            # Decays per channel and state, skip and time step bias per channel, three norms.
            other_parameters=inner * states + 2 * inner + rank + 2 * states + biases,
        )
    else:
        attention = _heads(config)
    is_sparse = config.layers_num_experts[index] > 1
    experts = Experts(config.num_experts, config.num_experts_per_tok, config.intermediate_size) if is_sparse else None
    return _layer(config, attention, experts, config.intermediate_size)


def _llama4(config: Any, index: int) -> Layer:
    is_chunked = config.layer_types[index] == "chunked_attention" and config.attention_chunk_size
    attention = _heads(config, **({"kind": "chunked", "window": config.attention_chunk_size} if is_chunked else {}))
    width = config.intermediate_size
    experts = Experts(config.num_local_experts, config.num_experts_per_tok, width, shared_width=width)
    return _layer(config, attention, experts if index in config.moe_layers else None, config.intermediate_size_mlp)


# One reader for each family: (its text configuration, the layer's index) to the layer.
FAMILIES: Mapping[str, Callable[[Any, int], Layer]] = {
    "deepseek_v2": _deepseek_v3,
    "deepseek_v3": _deepseek_v3,
    "flex_olmo": _olmoe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _mixtral,
    "jamba": _jamba,
    "llama4_text": _llama4,
    "minimax_m2": _olmoe,
    "mistral4": _deepseek_v3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe_text": _qwen3_moe,
}
