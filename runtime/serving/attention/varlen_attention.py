"""Attention over a step's trie with `torch.nn.attention.varlen`, for half precision on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from moepass.runtime.serving.attention.partial_attention import Partial, merge_into
from moepass.runtime.serving.attention.running_step import PreparedCall

# Limit and granularity of the numbers per head that the kernel supports.
MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


def takes_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float) -> bool:
    """Return whether the kernel supports such attention. It has no soft cap."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and is_half and not softcap and _head_dim(query, value) <= MOST_HEAD_DIM


def varlen_over_calls(
    calls: tuple[PreparedCall, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: Partial | None,
    scaling: float,
) -> Partial:
    """Return attention [1, heads, n, value_dim] and its log-sum-exp [1, heads, n], both in fp32.

    Args:
        calls: the calls that cover the trie; the first one is causal.
        query: [1, heads, n, key_dim]
        key: [1, kv_heads, n, key_dim]
        value: [1, kv_heads, n, value_dim]
        cached: concatenated keys and values [tokens, kv_heads, dim] of all chains of cached blocks, or None.
        scaling: factor of the scores.
    """
    value_dim, head_dim = value.shape[-1], _head_dim(query, value)
    queries, keys, values = (_padded(tensor[0].transpose(0, 1), head_dim) for tensor in (query, key, value))
    causal_call, *earlier_calls = calls
    first_output, sums = _varlen(queries, keys, values, causal_call, scaling, is_causal=True)
    output, log_sum_exp = first_output.float(), sums.contiguous()
    if cached is not None:
        keys, values = (
            torch.cat((stream_rows, _padded(tensor, head_dim)))
            for stream_rows, tensor in zip((keys, values), cached, strict=True)
        )
    for call in earlier_calls:
        rows = call.queries
        partial = _varlen(queries[rows], keys[call.keys], values[call.keys], call, scaling, is_causal=False)
        merged, merged_sums = output[rows], log_sum_exp[rows]
        merge_into(merged, merged_sums, partial)
        output[rows], log_sum_exp[rows] = merged, merged_sums
    return output[..., :value_dim].transpose(0, 1)[None], log_sum_exp.T[None]


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: PreparedCall, scaling: float, *, is_causal: bool
) -> Partial:
    """Return the output [n, heads, dim] and the log-sum-exp [n, heads] of one call."""
    result = varlen_attn(
        query,
        key,
        value,
        call.query_ends,
        call.key_ends,
        call.most_queries,
        call.most_keys,
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        window_size=(-1, 0) if is_causal else (-1, -1),
        enable_gqa=True,
        num_splits=1,  # otherwise sums, and so scores, depend on the longest sequence of the call
    )
    assert isinstance(result, tuple)
    output, log_sum_exp = result
    return output, log_sum_exp.T


def _head_dim(query: torch.Tensor, value: torch.Tensor) -> int:
    largest = max(query.shape[-1], value.shape[-1])
    return -(-largest // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def _padded(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pad heads with zeros up to `head_dim` numbers, which changes no product."""
    return F.pad(rows, (0, head_dim - rows.shape[-1])) if rows.shape[-1] < head_dim else rows.contiguous()
