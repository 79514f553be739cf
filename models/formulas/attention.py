"""Costs of attention without its projections: attention scores, scans of linear attention and state spaces.

Attention reads pairs: a token and one that it sees. A causal sequence of S tokens has S(S + 1)/2 of them, half of the
square that torch's counter assumes. A cached or shared prefix of P tokens adds S·P pairs.
"""

from __future__ import annotations

from moepass.models.formulas.gemms import gemm_flops, triangular_solve_flops
from moepass.models.formulas.sizes import Size, divided, smaller, whole_parts
from moepass.models.sizes.architecture import Attention

# Tokens that the delta rule takes at once: `chunk_size` of transformers' and flash-linear-attention's kernels.
DELTA_RULE_CHUNK = 64

# FLOPs per token, channel and state of a selective scan (Mamba) without its elementwise gate and skip:
# `selective_scan_flop_count` of mamba-ssm.
SCAN_FLOPS = 9


def causal_pairs(sequence: Size, window: Size | None = None, prefix: Size = 0) -> Size:
    """Return the pairs of a sequence after a prefix, if each token sees at most `window` tokens."""
    if prefix == 0:
        ramp = sequence if window is None else smaller(sequence, window)
        return divided(ramp * (ramp + 1), 2) + (sequence - ramp) * ramp
    return causal_pairs(prefix + sequence, window) - causal_pairs(prefix, window)


def chunked_pairs(sequence: Size, chunk: int, prefix: Size = 0) -> Size:
    """Return the pairs of a sequence after a prefix, if each token sees only earlier tokens of its chunk."""
    if prefix == 0:
        full = whole_parts(sequence, chunk)
        return full * causal_pairs(chunk) + causal_pairs(sequence - full * chunk)
    return chunked_pairs(prefix + sequence, chunk) - chunked_pairs(prefix, chunk)


def score_flops(pairs: Size, heads: Size, head_dim: Size, value_head_dim: Size) -> Size:
    """Return the FLOPs of queries times keys and of weights times values.

    Grouped queries (GQA) save bytes but no FLOPs, so `heads` counts query heads. Latent attention (MLA) in prefill runs
    on keys and values that were expanded to full size, so it costs as much as `heads` full heads.
    """
    return 2 * heads * (head_dim + value_head_dim) * pairs


def delta_rule_flops(tokens: Size, heads: Size, key_dim: Size, value_dim: Size) -> Size:
    """Return the FLOPs of the gated delta rule in chunks of C tokens (arXiv 2412.06464, in its WY form).

    Per head and token: keys times keys and queries times keys 4·C·dk; two triangular systems C·(dk + dv); the state,
    read twice and written once, 6·dk·dv; weights times values 2·C·dv.
    """
    chunk = DELTA_RULE_CHUNK
    among_tokens = 2 * gemm_flops(chunk, key_dim, chunk) + gemm_flops(chunk, chunk, value_dim)
    with_state = 3 * gemm_flops(chunk, key_dim, value_dim)
    systems = triangular_solve_flops(chunk, key_dim + value_dim)
    # All three are multiples of the chunk, so a token's share is a whole number.
    return divided(among_tokens + with_state + systems, chunk) * tokens * heads


def attention_flops(attention: Attention, batch: Size, sequence: Size, prefix: Size = 0) -> Size:
    """Return the FLOPs of attention without projections, for sequences after `prefix` cached tokens."""
    if attention.kind == "linear":
        return delta_rule_flops(batch * sequence, attention.heads, attention.head_dim, attention.value_head_dim)
    if attention.kind == "state_space":
        return SCAN_FLOPS * batch * sequence * attention.heads * attention.head_dim
    if attention.kind == "chunked":
        assert attention.window is not None
        pairs = chunked_pairs(sequence, attention.window, prefix)
    else:
        pairs = causal_pairs(sequence, attention.window, prefix)
    return batch * score_flops(pairs, attention.heads, attention.head_dim, attention.value_head_dim)
