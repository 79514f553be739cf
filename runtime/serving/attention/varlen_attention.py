"""Attention over a step's trie with `torch.nn.attention.varlen`, for half precision on CUDA.

Pseudo-code
    without a window    one causal call over the tokens of each node
                        for each level of the trie, one call of descendants over the tokens of their ancestors
    with a window       one call of each node over its last ancestors and itself, cut where it would gather too much
No two sequences of a call share a query, so the results of a call are merged at once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from moepass.runtime.serving.attention.partial_attention import Partial, merge_into
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import EarlierPart, TrieParts, VisiblePast, trie_parts
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch

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

# Limit of the bytes of keys and values that one call over a window, or over cached blocks, gathers.
GATHERED_BYTES = 512 << 20

# Sizes of a window as the kernel takes them: the keys before and after the query's own key, -1 for all.
Window = tuple[int, int]
_CAUSAL: Window = (-1, 0)
_ALL_KEYS: Window = (-1, -1)


def varlen_obstacle(dtype: torch.dtype, head_dim: int, softcap: float) -> str:
    """Return why the varlen kernel cannot compute a layer; empty if it can.

    `head_dim` is the larger of the numbers per head of keys and values.
    """
    if obstacle := _obstacle_of(varlen_attn):
        return obstacle
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if softcap:
        return "varlen_attn has no soft cap"
    if head_dim > MOST_HEAD_DIM:
        return f"varlen_attn takes heads of at most {MOST_HEAD_DIM} numbers, not {head_dim}"
    return ""


def layer_obstacle(layer: AttentionLayer) -> str:
    """Return why the varlen kernel cannot compute `layer`; empty if it can."""
    return varlen_obstacle(layer.shape.dtype, max(layer.shape.key_dim, layer.shape.value_dim), layer.softcap)


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


class VarlenCall(NamedTuple):
    """Sequences of queries over as many sequences of keys; the first ends at `query_ends[1]` and `key_ends[1]`.

    Attributes:
        queries: a slice of the stream, for the first call of its rows; otherwise rows whose results are merged.
        keys: rows of the stream; None if the keys are those of the queries, or all of them are cached.
        slots: cache slots of the cached keys; None without any.
        slot_rows: the places of these keys among `keys`, which has arbitrary rows there; None if all keys are cached.
        query_ends: [sequences + 1] cumulative lengths, from 0.
        key_ends: [sequences + 1] cumulative lengths, from 0.
        window: the keys that each query sees, where the last query and the last key of a sequence are the same token.
    """

    queries: torch.Tensor | slice
    keys: torch.Tensor | None
    slots: torch.Tensor | None
    slot_rows: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int
    window: Window


def varlen_calls(step: StepBatch, past: VisiblePast, token_bytes: int) -> tuple[VarlenCall, ...] | None:
    """Return the calls, on the CPU, for layers in which tokens see `past`; None if a part needs a mask.

    `token_bytes` are the bytes of the keys and values of a token. Only a window inside chunks needs masks.
    """
    if not past.first_seen(step.depth).any():
        past = VisiblePast()  # no token is deep enough for the limits
    context_tokens = [len(chain) * BLOCK_TOKENS for chain in step.contexts]
    context_slots = [
        (np.array(chain, np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel() for chain in step.contexts
    ]
    most_keys = max(1, GATHERED_BYTES // token_bytes)
    if past.window and not past.chunk:
        return tuple(_windowed_calls(step, past.window, context_slots, most_keys))
    parts = trie_parts(step.nodes, step.depth, context_tokens, past, parts_are_free=True)
    if not all(own_part.is_causal for own_part in parts.own) or not all(part.sees_all for part in parts.earlier):
        return None
    return tuple(_level_calls(parts, step.count, context_slots, most_keys))


def _level_calls(parts: TrieParts, tokens: int, context_slots: list[Indices], most_keys: int) -> list[VarlenCall]:
    """Return the calls of all levels. A call gathers at most `most_keys` cached keys, or those of a single part."""
    own = np.diff([0, *sorted(own_part.end for own_part in parts.own)])
    calls = [_call(slice(0, tokens), own, None, own, _CAUSAL)]
    levels: list[list[EarlierPart]] = []
    merged = np.zeros(tokens, np.int64)  # for each token, the number of levels with one of its parts
    for earlier in (earlier for earlier in parts.earlier if earlier.context < 0):
        level = int(merged[earlier.start : earlier.end].max())
        merged[earlier.start : earlier.end] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(earlier)
    for level_parts in levels:
        keys = [np.arange(earlier.key_start, earlier.key_end) for earlier in level_parts]
        calls.append(_earlier_call(level_parts, _lengths(keys), keys=np.concatenate(keys)))
    # A token follows at most one chain of cached blocks.
    cached = [earlier for earlier in parts.earlier if earlier.context >= 0]
    while cached:
        ends = np.cumsum([earlier.key_end - earlier.key_start for earlier in cached])
        count = max(1, int(np.searchsorted(ends, most_keys, side="right")))
        together, cached = cached[:count], cached[count:]
        slots = [context_slots[earlier.context][earlier.key_start : earlier.key_end] for earlier in together]
        calls.append(_earlier_call(together, _lengths(slots), slots=np.concatenate(slots)))
    return calls


def _earlier_call(
    parts: list[EarlierPart], key_lengths: Indices, keys: Indices | None = None, slots: Indices | None = None
) -> VarlenCall:
    queries = [np.arange(earlier.start, earlier.end) for earlier in parts]
    return _call(np.concatenate(queries), _lengths(queries), keys, key_lengths, _ALL_KEYS, slots)


def _windowed_calls(step: StepBatch, window: int, context_slots: list[Indices], most_keys: int) -> list[VarlenCall]:
    """Return calls with a sequence for each node: its tokens over its last `window` - 1 ancestors and itself.

    A call gathers at most `most_keys` keys, or has a single node.
    """
    # Nodes are in depth-first order, so below the depth of a node these are the rows of its ancestors, and below the
    # depth of its root cache slots, as ~slot.
    path = np.empty(int(step.depth.max()) + 1, np.int64)
    calls: list[VarlenCall] = []
    lengths: list[int] = []
    keys: list[Indices] = []
    start = gathered = 0
    for node in step.nodes:
        depth = int(step.depth[node.start])
        first, end = max(0, depth - window + 1), depth + node.end - node.start
        if node.parent < 0 and node.context >= 0:
            path[first:depth] = ~context_slots[node.context][first:depth]
        path[depth:end] = np.arange(node.start, node.end)
        if gathered and gathered + end - first > most_keys:
            calls.append(_windowed_call(start, lengths, keys, window))
            start, gathered, lengths, keys = node.start, 0, [], []
        lengths.append(node.end - node.start)
        keys.append(path[first:end].copy())
        gathered += end - first
    return [*calls, _windowed_call(start, lengths, keys, window)]


def _windowed_call(start: int, lengths: list[int], keys: list[Indices], window: int) -> VarlenCall:
    queries, rows = slice(start, start + sum(lengths)), np.concatenate(keys)
    slot_rows = np.flatnonzero(rows < 0)
    call = functools.partial(_call, queries, np.array(lengths), np.maximum(rows, 0), _lengths(keys), (window - 1, 0))
    return call(~rows[slot_rows], slot_rows) if len(slot_rows) else call()


def _lengths(sequences: list[Indices]) -> Indices:
    return np.array([len(rows) for rows in sequences], np.int64)


def _call(
    queries: Indices | slice,
    query_lengths: Indices,
    keys: Indices | None,
    key_lengths: Indices,
    window: Window,
    slots: Indices | None = None,
    slot_rows: Indices | None = None,
) -> VarlenCall:
    def ends(lengths: Indices) -> torch.Tensor:
        return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))

    def tensor(indices: Indices | None) -> torch.Tensor | None:
        return None if indices is None else torch.from_numpy(indices)

    return VarlenCall(
        queries if isinstance(queries, slice) else torch.from_numpy(queries),
        tensor(keys),
        tensor(slots),
        tensor(slot_rows),
        ends(query_lengths),
        ends(key_lengths),
        int(query_lengths.max()),
        int(key_lengths.max()),
        window,
    )


def takes_varlen(query: torch.Tensor, value: torch.Tensor, softcap: float) -> bool:
    """Return whether attention with such tensors uses the kernel."""
    return query.device.type == "cuda" and not varlen_obstacle(query.dtype, _head_dim(query, value), softcap)


def varlen_over_calls(
    calls: tuple[VarlenCall, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    read_cached: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None,
    scaling: float,
) -> Partial:
    """Return attention [1, heads, n, value_dim] and its log-sum-exp [1, heads, n], both in fp32.

    `query` is [1, heads, n, key_dim], `key` [1, kv_heads, n, key_dim] and `value` [1, kv_heads, n, value_dim].
    `read_cached` returns the keys and values [m, kv_heads, dim] of m cache slots; None without a cache.
    """
    value_dim, head_dim = value.shape[-1], _head_dim(query, value)
    queries, keys, values = (_padded(tensor[0].transpose(0, 1), head_dim) for tensor in (query, key, value))
    output = torch.empty_like(queries, dtype=torch.float32)
    log_sum_exp = output.new_empty(output.shape[:2])

    def keys_and_values(call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        if call.slots is None:
            rows = call.queries if call.keys is None else call.keys
            return keys[rows], values[rows]
        assert read_cached is not None
        cached_keys, cached_values = (_padded(tensor, head_dim) for tensor in read_cached(call.slots))
        if call.keys is None:
            return cached_keys, cached_values
        call_keys, call_values = keys[call.keys], values[call.keys]
        call_keys[call.slot_rows], call_values[call.slot_rows] = cached_keys, cached_values
        return call_keys, call_values

    # The tensors of a call are freed when the function returns, before those of the next call are made.
    def add(call: VarlenCall) -> None:
        rows = call.queries
        call_keys, call_values = keys_and_values(call)
        partial = _varlen(queries[rows], call_keys, call_values, call, scaling)
        if isinstance(rows, slice):
            output[rows], log_sum_exp[rows] = partial
        else:
            merged, merged_sums = output[rows], log_sum_exp[rows]
            merge_into(merged, merged_sums, partial)
            output[rows], log_sum_exp[rows] = merged, merged_sums

    for call in calls:
        add(call)
    return output[..., :value_dim].transpose(0, 1)[None], log_sum_exp.T[None]


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scaling: float) -> Partial:
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
        window_size=call.window,
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
