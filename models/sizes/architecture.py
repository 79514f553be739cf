"""What costs depend on: the sizes of a model's layers, whatever family it is of. `from_config` reads them.

Equal layers are equal records, so that what a layer costs is computed once per kind and not once per layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moepass.models.errors import InputError, one_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

ATTENTION_KINDS = ("full", "sliding", "chunked", "linear", "state_space")

# The names that plans, profiles and the command line use, by torch's.
DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): queries and key-value pairs pass through ranks; `query_rank` None: queries do not.

    `position_dim` is the part of `Attention.head_dim` that carries the position; its key is shared by all heads.
    """

    query_rank: int | None
    kv_rank: int
    position_dim: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer mixes tokens.

    `full` sees all tokens before, `sliding` the last `window` (its own included), `chunked` those of its own chunk of
    `window` tokens. `linear` is the gated delta rule: `heads` are value heads, `kv_heads` those of queries and keys,
    `convolution` the width of the convolution before. `state_space` is a selective scan (Mamba): `heads` channels of
    `head_dim` states each, time steps of rank `time_step_rank`. With `output_gate` the query projection gives a gate of
    the same width too. `other_parameters` are those outside matrix products: biases, norms, sinks, decays.
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None
    latent: Latent | None = None
    output_gate: bool = False
    convolution: int = 0
    time_step_rank: int = 0
    other_parameters: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ATTENTION_KINDS:
            raise InputError(
                f"attention of kind {self.kind!r} is unknown; the kinds are {one_of(ATTENTION_KINDS)}",
                name="kind",
                value=self.kind,
                expected=tuple(ATTENTION_KINDS),
            )
        if (self.window is not None) != (self.kind in ("sliding", "chunked")):
            raise InputError(
                f"attention of kind {self.kind!r} with window {self.window}: sliding and chunked have one",
                name="kind",
                value=self.kind,
            )
        for name in ("heads", "kv_heads", "head_dim", "value_head_dim", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(
                    f"{name} of attention is {value}; it must be 1 or more",
                    name=name,
                    value=value,
                    expected="1 or more",
                )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """All values of a token; linear attention has a value for every head, softmax attention one per kv head."""
        return (self.heads if self.kind == "linear" else self.kv_heads) * self.value_head_dim

    @property
    def output_width(self) -> int:
        return self.heads * self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer: `width` is one expert's, `shared_width` that of all shared ones together (0: none).

    A gated expert has three matrices, another one two. `shared_gate`: the shared experts' output is weighted by a
    product of its own. `bias`: the experts' products have biases, which lie in the bank. `router_bias`: so has the
    router.
    """

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    gated: bool = True
    bias: bool = False
    shared_gate: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise InputError(
                f"top_k is {self.top_k} of {self.count} experts; it must lie between 1 and that",
                name="top_k",
                value=self.top_k,
                expected=range(1, self.count + 1),
            )


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: token mixing, then experts or a gated MLP of `dense_width`. `norms`: its own norm weights."""

    attention: Attention
    experts: Experts | None
    dense_width: int | None
    norms: int = 0

    def __post_init__(self) -> None:
        if (self.experts is None) == (self.dense_width is None):
            raise InputError(
                f"a layer has experts or a dense width, not {self.experts} and {self.dense_width}",
                name="dense_width",
                value=self.dense_width,
            )


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A language model. `dtype` is a value of `DTYPES`; `other_parameters` are the last norm and the head's bias."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    dtype: str
    layers: tuple[Layer, ...]
    tied_embeddings: bool = False
    other_parameters: int = 0

    @functools.cached_property
    def layer_counts(self) -> dict[Layer, int]:
        """How often each kind of layer occurs, in the order of first occurrence."""
        return dict(Counter(self.layers))

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts is not None)

    @functools.cached_property
    def typical_moe_layer(self) -> Layer:
        """The most frequent kind of layer with experts. Raises InputError where there is none."""
        kinds = [layer for layer in self.layer_counts if layer.experts is not None]
        if not kinds:
            raise InputError(f"{self.name} has no layer with experts")
        return max(kinds, key=self.layer_counts.__getitem__)


def short_dtype(dtype: str | torch.dtype) -> str:
    """`bf16` for torch.bfloat16 and its like. Raises InputError for what is no dtype of weights."""
    name = str(dtype).removeprefix("torch.")
    if name in DTYPES.values():
        return name
    if name not in DTYPES:
        raise InputError(
            f"dtype {name!r} is unknown; it must be one of {one_of({*DTYPES, *DTYPES.values()})}",
            name="dtype",
            value=name,
            expected=(*DTYPES, *DTYPES.values()),
        )
    return DTYPES[name]


def from_config(config: PreTrainedConfig, *, name: str | None = None, dtype: str | None = None) -> Architecture:
    """The sizes that a Transformers configuration stands for.

    Args:
        config: of a family in `FAMILIES`; of a model with several parts, its text part is read.
        name: what to call the model; its model type where None.
        dtype: of the weights, instead of the one that the config names (bf16 where it names none).

    Raises:
        InputError: the family is not known here, or its config lacks what the family's configs have, or has numbers
            that make no layers.
    """
    text = config.get_text_config()
    family = FAMILIES.get(str(text.model_type))
    if family is None:
        raise InputError(
            f"the sizes of model_type {text.model_type!r} are not known; known are {one_of(FAMILIES)}",
            name="model_type",
            value=text.model_type,
            expected=tuple(FAMILIES),
        )
    try:
        layers = tuple(family(text, index) for index in range(text.num_hidden_layers))
        norm, head_bias = _outer_parameters(text)
        return Architecture(
            name=name or str(text.model_type),
            model_type=str(text.model_type),
            hidden=text.hidden_size,
            vocab=text.vocab_size,
            dtype=short_dtype(dtype or getattr(text, "dtype", None) or "bf16"),
            layers=layers,
            tied_embeddings=bool(text.tie_word_embeddings),
            other_parameters=norm + head_bias,
        )
    except AttributeError as error:
        raise InputError(
            f"the config of model_type {text.model_type!r} is incomplete: {error}",
            name="model_type",
            value=text.model_type,
        ) from error
    except InputError:
        raise
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:  # numbers that do not fit together
        raise InputError(
            f"the config of model_type {text.model_type!r} does not fit together: {error}",
            name="model_type",
            value=text.model_type,
        ) from error


def _outer_parameters(config: Any) -> tuple[int, int]:
    scales = 2 if config.model_type == "phimoe" else 1
    return scales * config.hidden_size, config.vocab_size * bool(getattr(config, "lm_head_bias", False))


def _heads(config: Any, *, bias: str = "qkvo", norms: int = 0, **fields: Any) -> Attention:
    """Softmax attention by the usual names. `bias`: which projections have one where the config wants biases."""
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
    is_sliding = config.layer_types[index] == "sliding_attention"
    attention = _heads(config, bias="qkv", **_windowed(config.sliding_window if is_sliding else None))
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
    """Mixtral, and families of the same layout: PhiMoE and Granite."""
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
    is_sliding = config.layer_types[index] == "sliding_attention"
    attention = _heads(
        config, norms=config.num_attention_heads, **_windowed(config.sliding_window if is_sliding else None)
    )
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
