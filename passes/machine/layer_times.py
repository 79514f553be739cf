"""Seconds of a model's layers on one rank of a machine that has all experts at hand, computed from sizes alone.

Products take what `times.py` says of their shapes; what reads and writes activations between them adds the time of its
bytes. Weights are read in the products.
"""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.attention import mixing_flops
from moepass.models.formulas.layers import mlp_parameters, projection_parameters
from moepass.models.formulas.memory import mixing_traffic_bytes, mlp_traffic_bytes
from moepass.models.sizes.architecture import Architecture, Layer
from moepass.passes.machine.hardware import Hardware
from moepass.passes.machine.times import attention_seconds, gemm_seconds, grouped_gemm_seconds, memory_seconds


@dataclasses.dataclass(frozen=True)
class Sequences:
    """What a rank computes in a step: `count` sequences of `length` tokens, each after a prefix of `prefix` tokens.

    The prefix was computed before: its tokens cost nothing here, but attention sees them.
    """

    count: int
    length: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.count * self.length


def sequences_of(tokens: int, longest: int) -> Sequences:
    """As many whole sequences of `longest` tokens as fit into `tokens`; one shorter sequence where none fits."""
    length = min(tokens, longest)
    return Sequences(tokens // length, length)


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """One layer: products with weights that all tokens meet, experts' products, attention scores, and memory passes.

    `mixing_*` come before the bank is needed, the others while it is read.
    """

    mixing_products: float
    mixing_scores: float
    mixing_passes: float
    mlp_products: float
    experts_products: float
    mlp_passes: float

    @property
    def mixing(self) -> float:
        return self.mixing_products + self.mixing_scores + self.mixing_passes

    @property
    def mlp(self) -> float:
        return self.mlp_products + self.experts_products + self.mlp_passes

    @property
    def total(self) -> float:
        return self.mixing + self.mlp


@dataclasses.dataclass(frozen=True)
class Split:
    """Over how many devices one layer's work is shared out: heads, the widths of MLPs and experts, whole experts.

    Where whole experts are shared out, a device computes its experts' rows of all devices: as many as without.
    """

    mixing: int = 1
    widths: int = 1
    experts: int = 1


WHOLE = Split()


def activation_dtype(dtype: str) -> str:
    """What activations are computed in where weights are `dtype`: products in fp8 take and give bf16."""
    return "bf16" if dtype == "fp8" else dtype


def layer_seconds(
    hardware: Hardware, layer: Layer, hidden: int, sequences: Sequences, dtype: str, split: Split = WHOLE
) -> LayerSeconds:
    """Seconds of one device's part of `layer`; weights are in `dtype`. Raises InputError for a dtype without a rate."""
    tokens, wide = sequences.tokens, activation_dtype(dtype)
    attention = layer.attention
    output_width = attention.output_width / split.mixing
    projections = projection_parameters(attention, hidden) / hidden / split.mixing - output_width
    mixing_products = gemm_seconds(hardware, dtype, tokens, hidden, projections)
    mixing_products += gemm_seconds(hardware, dtype, tokens, output_width, hidden)
    scores = mixing_flops(attention, sequences.count, sequences.length, sequences.prefix) / split.mixing
    mixing_passes = mixing_traffic_bytes(layer, hidden, tokens, wide) / split.mixing
    mlp_passes = mlp_traffic_bytes(layer, hidden, tokens, wide) / split.widths
    has_tiles = attention.kind in ("full", "sliding", "chunked")
    queries = tokens * attention.heads / split.mixing if has_tiles else None
    seen = sequences.prefix + sequences.length
    seen = min(seen, attention.window or seen)
    if layer.experts is None:
        assert layer.dense_width is not None
        products = gemm_seconds(hardware, dtype, tokens, hidden, mlp_parameters(1, layer.dense_width) / split.widths)
        routed = 0.0
    else:
        experts = layer.experts
        always = experts.count + mlp_parameters(1, experts.shared_width, experts.gated) / split.widths
        products = gemm_seconds(hardware, dtype, tokens, hidden, always)
        width, up = experts.width / split.widths, (2 if experts.gated else 1)
        rows, count = tokens * experts.top_k, experts.count / split.experts
        routed = grouped_gemm_seconds(hardware, dtype, rows, count, hidden, up * width)
        routed += grouped_gemm_seconds(hardware, dtype, rows, count, width, hidden)
    return LayerSeconds(
        mixing_products=mixing_products,
        mixing_scores=attention_seconds(hardware, wide, scores, 0.0, seen, attention.head_dim, queries=queries),
        mixing_passes=memory_seconds(hardware, mixing_passes),
        mlp_products=products,
        experts_products=routed,
        mlp_passes=memory_seconds(hardware, mlp_passes),
    )


def head_seconds(hardware: Hardware, architecture: Architecture, sequences: Sequences, dtype: str) -> float:
    """The logits of the last token of each sequence, which is all that prefill-only work needs."""
    return gemm_seconds(hardware, activation_dtype(dtype), sequences.count, architecture.hidden, architecture.vocab)
