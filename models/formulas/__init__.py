"""Every formula of moepass for FLOPs, parameters, bytes and thresholds, in one place.

May import sizes.

    gemms           matrix multiplications: GEMM, batched, grouped, convolution
    attention       pairs of tokens in attention, and their cost
    layers          parameters and FLOPs of a layer and of a model
    memory          bytes at rest and in motion: banks, keys and values, activations, traffic
    communication   bytes that each strategy sends per device and layer
    saturation      the number of tokens from which computation hides a transfer

Every size may be an int or a SymPy expression, such as `batch` and `sequence` below or a symbol of a captured graph.
Integers yield integers. Expressions yield expressions, which `evaluate` turns into numbers.

Conventions: a multiplication and an addition are 2 FLOPs. FLOPs count GEMMs, attention scores and scans; elementwise
work costs bytes, not FLOPs. Bytes are counted once per tensor read or written.
"""

from __future__ import annotations

from moepass.models.formulas.attention import (
    attention_flops,
    attention_pairs,
    causal_pairs,
    chunked_pairs,
    score_flops,
)
from moepass.models.formulas.communication import (
    STRATEGIES,
    all_gather_bytes,
    background_bytes,
    communication_bytes,
    exchanged_bytes,
    gathered_bytes,
    staged_bytes,
)
from moepass.models.formulas.gemms import (
    convolution_flops,
    gemm_bytes,
    gemm_flops,
    grouped_gemm_bytes,
    grouped_gemm_flops,
    triangular_solve_flops,
)
from moepass.models.formulas.layers import (
    active_parameters,
    attention_parameters,
    expert_parameters,
    experts_parameters,
    flops_behind_attention,
    flops_per_token,
    head_flops,
    layer_flops,
    layer_parameters,
    model_flops,
    model_parameters,
    projection_parameters,
)
from moepass.models.formulas.memory import (
    activation_bytes,
    bank_bytes,
    element_bytes,
    experts_hit,
    kv_bytes,
    layer_traffic_bytes,
    layer_weight_bytes,
    model_kv_bytes,
    resident_bytes,
    routed_activation_bytes,
)
from moepass.models.formulas.saturation import Saturation, saturation, threshold_of_one_sequence, threshold_of_sequences
from moepass.models.formulas.sizes import Size, batch, divided, evaluate, ranks, sequence, tokens

__all__ = [
    "STRATEGIES",
    "Saturation",
    "Size",
    "activation_bytes",
    "active_parameters",
    "all_gather_bytes",
    "attention_flops",
    "attention_pairs",
    "attention_parameters",
    "background_bytes",
    "bank_bytes",
    "batch",
    "causal_pairs",
    "chunked_pairs",
    "communication_bytes",
    "convolution_flops",
    "divided",
    "element_bytes",
    "evaluate",
    "exchanged_bytes",
    "expert_parameters",
    "experts_hit",
    "experts_parameters",
    "flops_behind_attention",
    "flops_per_token",
    "gathered_bytes",
    "gemm_bytes",
    "gemm_flops",
    "grouped_gemm_bytes",
    "grouped_gemm_flops",
    "head_flops",
    "kv_bytes",
    "layer_flops",
    "layer_parameters",
    "layer_traffic_bytes",
    "layer_weight_bytes",
    "model_flops",
    "model_kv_bytes",
    "model_parameters",
    "projection_parameters",
    "ranks",
    "resident_bytes",
    "routed_activation_bytes",
    "saturation",
    "score_flops",
    "sequence",
    "staged_bytes",
    "threshold_of_one_sequence",
    "threshold_of_sequences",
    "tokens",
    "triangular_solve_flops",
]
