"""Attention over a step's trie with `torch.nn.attention.varlen`, for half precision on CUDA.

No two parts of a call share a query, so the results of a call are merged at once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moepass.runtime.serving.attention.partial_attention import Partial, merge_into
from moepass.runtime.serving.attention.trie_parts import EarlierPart, TrieParts
from moepass.runtime.serving.batching.step_batch import Indices

# The sources also run with older versions of torch, on machines with GPUs where nothing can be installed.
try:
    _kernels: Any = importlib.import_module("torch.nn.attention.varlen")
except ImportError:
    _kernels = None
varlen_attn: Any = getattr(_kernels, "varlen_attn", None)
AuxRequest: Any = getattr(_kernels, "AuxRequest", None)

# Limit and granularity of the numbers per head that the kernel supports.
MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
_NEEDED = ("enable_gqa", "num_splits", "return_aux", "scale", "window_size")


def varlen_obstacle() -> str:
    """Return why attention cannot use the varlen kernel of this torch; empty if it can."""
    return _obstacle_of(varlen_attn)


@functools.cache  # every layer asks
def _obstacle_of(kernel: Callable[..., Any] | None) -> str:
    if kernel is None:
        lack = "has no torch.nn.attention.varlen"
    else:
        parameters = inspect.signature(kernel).parameters
        missing = [name for name in _NEEDED if name not in parameters]
        if not missing:
            return ""
        lack = f"has varlen_attn without {', '.join(missing)}"
    return f"torch {torch.__version__} {lack}; torch 2.13 has it"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class VarlenCall:
    """Sequences of queries over as many sequences of keys; the first ends at `query_ends[1]` and `key_ends[1]`.

    Attributes:
        queries: rows of the stream; None for the complete stream.
        keys: rows of the stream, followed by the chains of cached blocks; None for causal attention over the queries.
        query_ends: [sequences + 1] cumulative lengths, from 0.
        key_ends: [sequences + 1] cumulative lengths, from 0.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


def varlen_calls(
    parts: TrieParts, context_tokens: Sequence[int], tokens: int, device: torch.device
) -> tuple[VarlenCall, ...] | None:
    """Return the calls for `parts` of a stream of `tokens` tokens, the first one causal; None if a part needs a mask.

    `context_tokens` are the lengths of the chains of cached blocks.
    """
    if not all(own_part.is_causal for own_part in parts.own) or not all(part.sees_all for part in parts.earlier):
        return None

    def call(query_lengths: Indices, key_lengths: Indices, *rows: Indices | None) -> VarlenCall:
        queries, keys = (None if indices is None else torch.from_numpy(indices).to(device) for indices in rows)
        ends = (np.append(0, np.cumsum(lengths)).astype(np.int32) for lengths in (query_lengths, key_lengths))
        query_ends, key_ends = (torch.from_numpy(positions).to(device) for positions in ends)
        return VarlenCall(queries, keys, query_ends, key_ends, int(query_lengths.max()), int(key_lengths.max()))

    own = np.diff([0, *sorted(own_part.end for own_part in parts.own)])
    calls = [call(own, own, None, None)]
    first_rows = tokens + np.concatenate(([0], np.cumsum(context_tokens, dtype=np.int64)))
    levels: list[list[EarlierPart]] = []
    merged = np.zeros(tokens, np.int64)  # for each token, the number of levels with one of its parts
    for earlier in parts.earlier:
        level = int(merged[earlier.start : earlier.end].max())
        merged[earlier.start : earlier.end] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(earlier)
    for level_parts in levels:
        queries = [np.arange(earlier.start, earlier.end) for earlier in level_parts]
        keys = [
            np.arange(earlier.key_start, earlier.key_end) + (first_rows[earlier.context] if earlier.context >= 0 else 0)
            for earlier in level_parts
        ]
        lengths = [np.array([len(rows) for rows in rows_of_parts]) for rows_of_parts in (queries, keys)]
        calls.append(call(*lengths, np.concatenate(queries), np.concatenate(keys)))
    return tuple(calls)


def takes_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float) -> bool:
    """Return whether the kernel supports such attention. It has no soft cap."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16) or softcap:
        return False
    return _head_dim(query, value) <= MOST_HEAD_DIM and not varlen_obstacle()


def varlen_over_calls(
    calls: tuple[VarlenCall, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: Partial | None,
    scaling: float,
) -> Partial:
    """Return attention [1, heads, n, value_dim] and its log-sum-exp [1, heads, n], both in fp32.

    `query` is [1, heads, n, key_dim], `key` [1, kv_heads, n, key_dim] and `value` [1, kv_heads, n, value_dim]. `cached`
    are the concatenated keys and values [tokens, kv_heads, dim] of all chains of cached blocks, if there are any.
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scaling: float, *, is_causal: bool
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
