"""Seconds of a model's layers on one rank with all experts in memory, computed from sizes alone.

`times.py` computes the seconds of each GEMM from its shape, including the time to read its weights. Operations between
GEMMs (norms, activations, residuals) take the time of the bytes that they read and write.
"""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.layers import mlp_parameters, projection_parameters
from moepass.models.formulas.memory import attention_traffic_bytes, mlp_traffic_bytes
from moepass.models.sizes.architecture import Architecture, Layer
from moepass.passes.machine.hardware import Hardware
from moepass.passes.machine.times import attention_seconds, gemm_seconds, grouped_gemm_seconds, memory_seconds


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The work of a rank in a step: `count` sequences of `length` tokens, after cached prefixes of `prefix` tokens.

    Prefix tokens cost nothing here, but attention sees them.
    """

    count: int
    length: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return self.count * self.length


def sequences_of(tokens: int, longest: int) -> Sequences:
    """Return the sequences of `longest` tokens that fit into `tokens`, or one shorter sequence if none fits."""
    length = min(tokens, longest)
    return Sequences(tokens // length, length)


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer: GEMMs, attention scores, grouped GEMMs of experts, and passes over activations in memory.

    The `attention_*` fields run before the layer's bank is needed; all other fields run while it is read.
    """

    attention_gemms: float
    attention_scores: float
    attention_passes: float
    mlp_gemms: float
    expert_gemms: float
    mlp_passes: float

    @property
    def attention(self) -> float:
        """Seconds before the bank is needed."""
        return self.attention_gemms + self.attention_scores + self.attention_passes

    @property
    def mlp(self) -> float:
        """Seconds while the bank is read."""
        return self.mlp_gemms + self.expert_gemms + self.mlp_passes

    @property
    def total(self) -> float:
        """Seconds of the layer."""
        return self.attention + self.mlp


@dataclasses.dataclass(frozen=True)
class Split:
    """Numbers of devices that share a layer's attention heads, MLP widths and experts.

    With `experts`, a device holds fewer experts but computes their rows for all devices, so its number of rows stays.
    """

    attention: int = 1
    widths: int = 1
    experts: int = 1


WHOLE = Split()


def activation_dtype(dtype: str) -> str:
    """Return the dtype of activations for weights of `dtype`: GEMMs in fp8 read and write bf16."""
    return "bf16" if dtype == "fp8" else dtype


def layer_seconds(
    hardware: Hardware, layer: Layer, hidden: int, sequences: Sequences, dtype: str, split: Split = WHOLE
) -> LayerSeconds:
    """Return the seconds of one device's share of `layer`; `dtype` is the dtype of the weights.

    Raises InputError for a dtype without a rate in the profile.
    """
    tokens, wide = sequences.tokens, activation_dtype(dtype)
    attention = layer.attention
    output_width = attention.output_width / split.attention
    projections = projection_parameters(attention, hidden) / hidden / split.attention - output_width
    attention_gemms = gemm_seconds(hardware, dtype, tokens, hidden, projections)
    attention_gemms += gemm_seconds(hardware, dtype, tokens, output_width, hidden)
    scores = attention_flops(attention, sequences.count, sequences.length, sequences.prefix) / split.attention
    attention_passes = attention_traffic_bytes(layer, hidden, tokens, wide) / split.attention
    mlp_passes = mlp_traffic_bytes(layer, hidden, tokens, wide) / split.widths
    has_tiles = attention.kind in ("full", "sliding", "chunked")
    queries = tokens * attention.heads / split.attention if has_tiles else None
    seen = sequences.prefix + sequences.length
    seen = min(seen, attention.window or seen)
    if layer.experts is None:
        assert layer.dense_width is not None
        gemms = gemm_seconds(hardware, dtype, tokens, hidden, mlp_parameters(1, layer.dense_width) / split.widths)
        routed = 0.0
    else:
        experts = layer.experts
        always = experts.count + mlp_parameters(1, experts.shared_width, experts.gated) / split.widths
        gemms = gemm_seconds(hardware, dtype, tokens, hidden, always)
        width, up = experts.width / split.widths, (2 if experts.gated else 1)
        rows, count = tokens * experts.top_k, experts.count / split.experts
        routed = grouped_gemm_seconds(hardware, dtype, rows, count, hidden, up * width)
        routed += grouped_gemm_seconds(hardware, dtype, rows, count, width, hidden)
    return LayerSeconds(
        attention_gemms=attention_gemms,
        attention_scores=attention_seconds(hardware, wide, scores, 0.0, seen, attention.head_dim, queries=queries),
        attention_passes=memory_seconds(hardware, attention_passes),
        mlp_gemms=gemms,
        expert_gemms=routed,
        mlp_passes=memory_seconds(hardware, mlp_passes),
    )


def head_seconds(hardware: Hardware, architecture: Architecture, sequences: Sequences, dtype: str) -> float:
    """Return the time to compute the logits of each sequence's last token. Prefill-only work needs no other logits."""
    return gemm_seconds(hardware, activation_dtype(dtype), sequences.count, architecture.hidden, architecture.vocab)
