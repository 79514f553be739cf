"""Attention of queries over a part of their keys, with the log-sum-exp that merges parts (arXiv 2402.05099).

Queries are [b, heads, n, key_dim], keys [b, kv_heads, m, key_dim], values [b, kv_heads, m, value_dim]; heads of queries
are a multiple of those of keys (GQA). Views with any strides will do. A result is `(output, log_sum_exp)`: the
attention over these keys alone, [b, heads, n, value_dim] in the dtype of the values or fp32, and the logarithm of the
sum that it was divided by, [b, heads, n] in fp32; -inf where a query sees none of the keys, and its output is 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from moepass.runtime.torch_private import flash_attention_on_cpu, memory_efficient_attention

# Scores that explicit attention keeps at once. [Empirical] On a CPU 16 MiB take a third longer, 64 MiB three times as
# long; elsewhere every block is a few launches more.
SCORE_BYTES = 4 << 20
SCORE_BYTES_ELSEWHERE = 256 << 20

Partial = tuple[torch.Tensor, torch.Tensor]


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float = 0.0,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Partial:
    """`is_causal`: as many keys as queries, and each query sees the keys up to its own. Else `mask`, an
    `additive_mask` [b or 1, n, m], or every query sees every key.

    `softcap` above 0: scores s become softcap · tanh(s / softcap).
    """
    # Kernels read the numbers of a head as neighbours, and do not look whether they are.
    query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    if query.device.type == "cpu":
        # Parts that are rounded to bf16 make another sum than the whole: scores would depend on what a step shares.
        query, key, value = query.float(), key.float(), value.float()
    if query.device.type == "cpu" and not softcap:
        return _on_cpu(query, key, value, scaling, is_causal, mask)
    if query.device.type == "cuda" and not softcap and mask is None:
        return _on_cuda(query, key, value, scaling, is_causal)
    return _explicit(query, key, value, scaling, softcap, is_causal, mask)


def additive_mask(visible: torch.Tensor) -> torch.Tensor:
    """0 where `visible`, -inf elsewhere, in fp32."""
    return torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, -math.inf)


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    # The kernel wants one size for both. Zeros change no product.
    if value_dim < key_dim:
        value = F.pad(value, (0, key_dim - value_dim))
    elif key_dim < value_dim:
        query, key = (F.pad(one, (0, value_dim - key_dim)) for one in (query, key))
    added = None if mask is None else mask[:, None]
    output, log_sum_exp = flash_attention_on_cpu(query, key, value, scaling, is_causal, added)
    if mask is not None:
        # The kernel says 0 where a query sees no key.
        log_sum_exp = log_sum_exp + mask.amax(-1)[:, None]
    return output[..., :value_dim], log_sum_exp


def _on_cuda(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, is_causal: bool) -> Partial:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # the kernel knows no GQA
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    output, log_sum_exp = memory_efficient_attention(query, key, value, scaling, is_causal)
    return output, log_sum_exp[..., : query.shape[2]]


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """Scores, softmax and weighted values one after the other, block of queries by block; scores in fp32."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    output = query.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
    log_sum_exp = query.new_empty(batch, heads, queries, dtype=torch.float32)
    score_bytes = SCORE_BYTES if query.device.type == "cpu" else SCORE_BYTES_ELSEWHERE
    rows = max(1, score_bytes // (4 * batch * heads * keys))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        seen = stop if is_causal else keys
        # Queries that share a key head become rows of one product, so that keys are not repeated.
        grouped = query[:, :, start:stop].unflatten(1, (kv_heads, -1)).flatten(2, 3)
        scores = (grouped @ key[:, :, :seen].mT).float().unflatten(2, (heads // kv_heads, -1))
        if softcap:
            scores.mul_(scaling / softcap).tanh_().mul_(softcap)
        else:
            scores.mul_(scaling)
        if is_causal:
            columns = torch.arange(seen, device=query.device)
            scores.masked_fill_(columns > columns[start:stop, None], -math.inf)
        elif mask is not None:
            scores.add_(mask[:, None, None, start:stop])
        sums = scores.logsumexp(-1)
        # Queries without a key: weights of 0 instead of NaN.
        weights = scores.sub_(sums.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1)).exp_()
        result = weights.to(value.dtype).flatten(2, 3) @ value[:, :, :seen]
        output[:, :, start:stop] = result.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)
        log_sum_exp[:, :, start:stop] = sums.flatten(1, 2)
    return output, log_sum_exp


def merge_into(output: torch.Tensor, log_sum_exp: torch.Tensor, other: Partial) -> None:
    """Attention over the keys of both parts, written into `output` (fp32) and `log_sum_exp`, whose place it takes.

    At least one of both must have seen a key: a query's own part always has.
    """
    other_output, other_sum = other
    share = torch.sigmoid(other_sum - log_sum_exp).unsqueeze(-1)
    output.lerp_(other_output.float(), share)
    torch.logaddexp(log_sum_exp, other_sum, out=log_sum_exp)
