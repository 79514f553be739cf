"""Attention of queries over some of their keys, with the log-sum-exp that merges partial results (arXiv 2402.05099).

Queries are [b, heads, n, key_dim], keys [b, kv_heads, m, key_dim], values [b, kv_heads, m, value_dim]. The number of
query heads is a multiple of the number of key heads (GQA). Any strides are allowed. A result is `(output,
log_sum_exp)`. The output [b, heads, n, value_dim] is the attention over these keys alone, in the dtype of the values or
fp32. The log-sum-exp [b, heads, n] in fp32 is the logarithm of its denominator. A query that sees no key has output 0
and log-sum-exp -inf.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from moepass.runtime.torch_private import flash_attention_on_cpu, memory_efficient_attention

# [Empirical] Bytes of scores that explicit attention computes at a time. On a CPU, 16 MiB take a third longer, and
# 64 MiB three times as long. On other devices, each block costs a few kernel launches.
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
    """Return attention over some keys, with `scaling` as the factor of the scores.

    With `is_causal`, there are as many keys as queries, and each query sees the keys up to its own. Otherwise the
    `additive_mask` [b or 1, n, m] decides, and without one every query sees every key. With a `softcap` above 0, scores
    s become softcap · tanh(s / softcap).
    """
    # The kernels assume that the numbers of a head are contiguous, without a check.
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    device = query.device.type
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if device == "cpu":
        # If parts were rounded to bf16, scores would depend on how a step is split.
        query, key, value = query.float(), key.float(), value.float()
    if device == "cpu" and not softcap:
        # The kernel requires one size for keys and values. Zeros change no product.
        if value_dim < key_dim:
            value = F.pad(value, (0, key_dim - value_dim))
        elif key_dim < value_dim:
            query, key = (F.pad(tensor, (0, value_dim - key_dim)) for tensor in (query, key))
        kernel_mask = None if mask is None else mask[:, None]
        output, log_sum_exp = flash_attention_on_cpu(query, key, value, scaling, is_causal, kernel_mask)
        if mask is not None:
            # The kernel returns 0 if a query sees no key.
            log_sum_exp = log_sum_exp + mask.amax(-1)[:, None]
        return output[..., :value_dim], log_sum_exp
    if device == "cuda" and not softcap and mask is None:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # the kernel does not support GQA
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        output, log_sum_exp = memory_efficient_attention(query, key, value, scaling, is_causal)
        return output, log_sum_exp[..., : query.shape[2]]
    return _explicit(query, key, value, scaling, softcap, is_causal, mask)


def additive_mask(visible: torch.Tensor) -> torch.Tensor:
    """Return 0 where `visible` is True and -inf elsewhere, in fp32."""
    return torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, -math.inf)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float,
    is_causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """Compute scores, softmax and weighted values one after the other, for one block of queries at a time, in fp32."""
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
        # The clamp gives queries without a key the weight 0 instead of NaN.
        weights = scores.sub_(sums.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1)).exp_()
        result = weights.to(value.dtype).flatten(2, 3) @ value[:, :, :seen]
        output[:, :, start:stop] = result.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)
        log_sum_exp[:, :, start:stop] = sums.flatten(1, 2)
    return output, log_sum_exp


def merge_into(output: torch.Tensor, log_sum_exp: torch.Tensor, other: Partial) -> None:
    """Merge attention over further keys into `output` (fp32) and `log_sum_exp`, in place.

    Each query must see a key in at least one of the two; its own part always contains one.
    """
    other_output, other_sum = other
    share = torch.sigmoid(other_sum - log_sum_exp).unsqueeze(-1)
    output.lerp_(other_output.float(), share)
    torch.logaddexp(log_sum_exp, other_sum, out=log_sum_exp)
