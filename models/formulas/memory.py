"""Bytes at rest (weights, banks, keys and values, activations) and in motion (what a layer reads and writes).

Banks are given without the padding between their tensors, which is below 1 KiB.
"""

from __future__ import annotations

from moepass.models.errors import InputError, one_of
from moepass.models.formulas.layers import expert_parameters, layer_parameters, model_parameters
from moepass.models.formulas.sizes import Size, smaller
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

# Recurrent states are kept in float32, whatever the model's type.
STATE_ELEMENT_BYTES = 4


def element_bytes(dtype: str) -> int:
    """Bytes of one element. Raises InputError for an unknown name."""
    if dtype not in ELEMENT_BYTES:
        raise InputError(
            f"dtype {dtype!r} is unknown; it must be one of {one_of(ELEMENT_BYTES)}",
            name="dtype",
            value=dtype,
            expected=tuple(ELEMENT_BYTES),
        )
    return ELEMENT_BYTES[dtype]


def bank_bytes(experts: Experts, hidden: int, dtype: str) -> int:
    """W: bytes of one layer's routed experts."""
    return experts.count * expert_parameters(experts, hidden) * element_bytes(dtype)


def layer_weight_bytes(layer: Layer, hidden: int, dtype: str) -> int:
    """Bytes of a layer's weights without its bank."""
    return layer_parameters(layer, hidden, routed=0) * element_bytes(dtype)


def resident_bytes(architecture: Architecture, dtype: str | None = None) -> int:
    """Bytes of everything but the banks: what every rank holds."""
    dtype = dtype or architecture.dtype
    banks = sum(
        count * bank_bytes(layer.experts, architecture.hidden, dtype)
        for layer, count in architecture.layer_counts.items()
        if layer.experts is not None
    )
    return model_parameters(architecture) * element_bytes(dtype) - banks


def kv_bytes(attention: Attention, batch: Size, sequence: Size, dtype: str) -> Size:
    """Bytes that one layer must keep of `batch` sequences of `sequence` tokens: 2·B·S·Nkv·dh·b for ordinary attention.

    Windows and chunks keep their last tokens only, latent attention its compressed form, recurrent layers a state.
    """
    if attention.kind in ("linear", "state_space"):
        return batch * attention.heads * attention.head_dim * attention.value_head_dim * STATE_ELEMENT_BYTES
    kept = sequence if attention.window is None else smaller(sequence, attention.window)
    if attention.latent is not None:
        width = attention.latent.kv_rank + attention.latent.position_dim
    else:
        width = attention.key_width + attention.value_width
    return batch * kept * width * element_bytes(dtype)


def model_kv_bytes(architecture: Architecture, batch: Size, sequence: Size, dtype: str | None = None) -> Size:
    """`kv_bytes` of all layers."""
    dtype = dtype or architecture.dtype
    return sum(
        count * kv_bytes(layer.attention, batch, sequence, dtype) for layer, count in architecture.layer_counts.items()
    )


def routed_activation_bytes(experts: Experts, tokens: Size, dtype: str) -> Size:
    """The up projection's result: 2·B·S·k·h·b, which is what arXiv 2605.02960 counts as activations."""
    return (2 if experts.gated else 1) * tokens * experts.top_k * experts.width * element_bytes(dtype)


def activation_bytes(layer: Layer, hidden: int, tokens: Size, dtype: str) -> Size:
    """Bytes of the tensors that live at once in a layer, at their peak; attention scores are never whole in memory.

    Derived from the order of operations in a captured layer, each written to memory of its own: the residual stream
    and its normalised form live from one end of the layer to the other.
    """
    attention = layer.attention
    inputs = attention.query_width + attention.key_width + attention.value_width
    live_widths = [inputs + attention.output_width, attention.output_width + hidden]
    if layer.experts is None:
        assert layer.dense_width is not None
        live_widths += [3 * layer.dense_width, layer.dense_width + hidden]
    else:
        experts = layer.experts
        # `routed` values are the result of the up projection, `inner` of them are left behind the gate.
        routed = routed_activation_bytes(experts, 1, "fp8")
        inner = experts.top_k * experts.width
        copies = experts.top_k * hidden
        live_widths += [copies + routed, routed + inner, inner + copies, 2 * copies + hidden, 3 * experts.shared_width]
    return tokens * (2 * hidden + max(live_widths)) * element_bytes(dtype)


def experts_hit(experts: Size, top_k: Size, tokens: Size) -> Size:
    """Experts that at least one of `tokens` tokens is routed to, on average, if all are equally likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def attention_traffic_bytes(layer: Layer, hidden: int, tokens: Size, activation_dtype: str = "bf16") -> Size:
    """Bytes of activations that attention reads and writes, its norm and the addition to the residual stream too.

    Attention reads queries, keys and values once, as fused kernels do for all but the longest sequences.
    """
    attention = layer.attention
    inputs = attention.query_width + attention.key_width + attention.value_width
    # A norm reads and writes; the addition reads two and writes one. Projections, attention, the last projection.
    elements = 5 * hidden + hidden + inputs + inputs + attention.output_width + attention.output_width + hidden
    return tokens * elements * element_bytes(activation_dtype)


def mlp_traffic_bytes(layer: Layer, hidden: int, tokens: Size, activation_dtype: str = "bf16") -> Size:
    """Bytes of activations that experts or a dense MLP read and write, with norm and addition as for attention."""
    elements = 5 * hidden
    if layer.experts is None:
        assert layer.dense_width is not None
        # Up and gate written and read, their product written and read.
        elements += 2 * hidden + 6 * layer.dense_width
    else:
        experts = layer.experts
        up = (2 if experts.gated else 1) * experts.width
        # Rows gathered, read, multiplied, weighted, brought back into order and summed.
        elements += hidden + experts.count + experts.top_k * (8 * hidden + 2 * up + 2 * experts.width) + hidden
        elements += (2 * hidden + 6 * experts.shared_width) if experts.shared_width else 0
    return tokens * elements * element_bytes(activation_dtype)


def layer_traffic_bytes(layer: Layer, hidden: int, tokens: Size, dtype: str, activation_dtype: str = "bf16") -> Size:
    """Bytes that a layer reads and writes: weights once, operands and result of every GEMM, elementwise passes.

    The floor under a layer's time is this over the memory's rate. Of the experts those count that tokens are routed to.
    """
    weights: Size = layer_weight_bytes(layer, hidden, dtype)
    if layer.experts is not None:
        experts = layer.experts
        weights += (
            experts_hit(experts.count, experts.top_k, tokens)
            * expert_parameters(experts, hidden)
            * element_bytes(dtype)
        )
    activations = attention_traffic_bytes(layer, hidden, tokens, activation_dtype)
    return weights + activations + mlp_traffic_bytes(layer, hidden, tokens, activation_dtype)
