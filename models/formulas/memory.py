"""Bytes at rest (weights, banks, keys and values, activations) and in motion (reads and writes of a layer).

Sizes of banks exclude padding, which is less than 256 bytes per tensor.
"""

from __future__ import annotations

from moepass.models.errors import InputError
from moepass.models.formulas.layers import expert_parameters, model_parameters
from moepass.models.formulas.sizes import Size, smaller
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Recurrent states are float32 for every dtype of the model.
STATE_ELEMENT_BYTES = 4


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises InputError for an unknown dtype."""
    if dtype not in ELEMENT_BYTES:
        raise InputError.unknown("dtype", dtype, ELEMENT_BYTES)
    return ELEMENT_BYTES[dtype]


def bank_bytes(experts: Experts, hidden: int, dtype: str) -> int:
    """Return W, the bytes of one layer's routed experts."""
    return experts.count * expert_parameters(experts, hidden) * element_bytes(dtype)


def resident_bytes(architecture: Architecture, dtype: str | None = None) -> int:
    """Return the bytes of all weights except the banks, which every rank holds."""
    dtype = dtype or architecture.dtype
    banks = sum(
        count * bank_bytes(layer.experts, architecture.hidden, dtype)
        for layer, count in architecture.layer_counts.items()
        if layer.experts is not None
    )
    return model_parameters(architecture) * element_bytes(dtype) - banks


def kv_bytes(attention: Attention, batch: Size, sequence: Size, dtype: str) -> Size:
    """Return the bytes that one layer caches of `batch` sequences of `sequence` tokens.

    Ordinary attention caches 2·B·S·Nkv·dh·b bytes; windows and chunks only their last tokens, latent attention its
    compressed form, recurrent layers a state.
    """
    if attention.kind in ("linear", "state_space"):
        return batch * attention.heads * attention.head_dim * attention.value_head_dim * STATE_ELEMENT_BYTES
    cached = sequence if attention.window is None else smaller(sequence, attention.window)
    if attention.latent is not None:
        width = attention.latent.kv_rank + attention.latent.position_dim
    else:
        width = attention.key_width + attention.value_width
    return batch * cached * width * element_bytes(dtype)


def model_kv_bytes(architecture: Architecture, batch: Size, sequence: Size, dtype: str | None = None) -> Size:
    """Return `kv_bytes` of all layers."""
    dtype = dtype or architecture.dtype
    return sum(
        count * kv_bytes(layer.attention, batch, sequence, dtype) for layer, count in architecture.layer_counts.items()
    )


def activation_bytes(layer: Layer, hidden: int, tokens: Size, dtype: str) -> Size:
    """Return the peak bytes of the tensors of a layer that are live at the same time.

    Derived from the order of operations in a captured layer, if each result is a new tensor. The residual stream and
    its normalised form are live from one end of the layer to the other. Complete attention scores never exist.
    """
    attention = layer.attention
    inputs = attention.query_width + attention.key_width + attention.value_width
    live_widths = [inputs + attention.output_width, attention.output_width + hidden]
    if layer.experts is None:
        assert layer.dense_width is not None
        live_widths += [3 * layer.dense_width, layer.dense_width + hidden]
    else:
        experts = layer.experts
        # The up projection computes `routed` values, of which the gate leaves `inner`. (arXiv 2605.02960 counts only
        # the bytes of `routed` as activations.)
        inner = experts.top_k * experts.width
        routed = (2 if experts.gated else 1) * inner
        copies = experts.top_k * hidden
        live_widths += [copies + routed, routed + inner, inner + copies, 2 * copies + hidden, 3 * experts.shared_width]
    return tokens * (2 * hidden + max(live_widths)) * element_bytes(dtype)


def experts_hit(experts: Size, top_k: Size, tokens: Size) -> Size:
    """Return the average number of experts that receive at least one of `tokens` tokens, if all are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def attention_traffic_bytes(layer: Layer, hidden: int, tokens: Size, dtype: str) -> Size:
    """Return the bytes of activations that attention reads and writes, with its norm and residual addition.

    Attention reads queries, keys and values once, like fused kernels except for the longest sequences.
    """
    attention = layer.attention
    inputs = attention.query_width + attention.key_width + attention.value_width
    # A norm reads and writes one tensor; the addition reads two and writes one. Then the projections around attention.
    elements = 5 * hidden + hidden + inputs + inputs + attention.output_width + attention.output_width + hidden
    return tokens * elements * element_bytes(dtype)


def mlp_traffic_bytes(layer: Layer, hidden: int, tokens: Size, dtype: str) -> Size:
    """Return the bytes of activations that experts or a dense MLP read and write, with norm and residual addition."""
    elements = 5 * hidden
    if layer.experts is None:
        assert layer.dense_width is not None
        # Up and gate written and read, their product written and read.
        elements += 2 * hidden + 6 * layer.dense_width
    else:
        experts = layer.experts
        up = (2 if experts.gated else 1) * experts.width
        # Rows are gathered, read, multiplied, weighted, reordered and summed.
        elements += hidden + experts.count + experts.top_k * (8 * hidden + 2 * up + 2 * experts.width) + hidden
        elements += (2 * hidden + 6 * experts.shared_width) if experts.shared_width else 0
    return tokens * elements * element_bytes(dtype)
