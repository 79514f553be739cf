"""Memory that attention over a trie takes beside its queries, keys, values and result: upper bounds from sizes alone.

masks       of the parts of a step that need one, held for the whole step up to a limit
results     of all tokens in fp32, and those of one part or call before they are merged into them
operands    of one part or call: gathered rows, cached blocks, copies in the dtype and layout of its kernel
"""

from __future__ import annotations

import math

import torch

from moepass.runtime.serving.attention.partial_attention import SCORE_BYTES, SCORE_BYTES_ELSEWHERE
from moepass.runtime.serving.attention.running_step import BATCH_ROWS, HELD_MASK_BYTES
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import MASK_NUMBERS
from moepass.runtime.serving.attention.varlen_attention import GATHERED_BYTES, HEAD_DIM_MULTIPLE, layer_obstacle

# Queries and keys of a block in torch's attention for CPUs; each thread holds the scores of a block.
_BLOCK_QUERIES, _BLOCK_KEYS = 256, 512
# Tensors as large as a block of scores that explicit attention holds at once: products, scores, exponentials, weights.
_SCORE_TENSORS = 4
# Bytes for each number of a mask while it is made: the mask in fp32, and its condition and the opposite.
_MASK_BYTES = 6
# Numbers of a mask for each token of a batch: a part of 29 tokens has 32 queries and keys.
_BATCHED_MASK_NUMBERS = 36


def held_mask_bytes(tokens: int) -> int:
    """Return the most bytes of masks that a step holds for layers that see the same past."""
    unbatched = min(tokens * min(tokens, math.isqrt(MASK_NUMBERS)), HELD_MASK_BYTES // 4)
    return 4 * (unbatched + _BATCHED_MASK_NUMBERS * tokens)


def trie_bytes(layer: AttentionLayer, tokens: int, device_type: str, context_tokens: int = 0) -> int:
    """Return the most bytes that `layer` takes for a step of `tokens` tokens.

    `context_tokens` is the length of the longest chain of cached blocks. A layer for the varlen kernel may run in parts
    where a part needs a mask, so that both count.
    """
    by_parts = _parts_bytes(layer, tokens, device_type, context_tokens)
    if device_type == "cpu" or layer_obstacle(layer):
        return by_parts
    by_calls = _calls_bytes(layer, tokens, context_tokens)
    return max(by_calls, by_parts) if layer.past.chunk else by_calls


def _parts_bytes(layer: AttentionLayer, tokens: int, device_type: str, context_tokens: int) -> int:
    heads, kv_heads, shape = layer.heads, layer.shape.kv_heads, layer.shape
    size, widest = shape.dtype.itemsize, max(shape.key_dim, shape.value_dim)
    query_width, key_width = heads * shape.key_dim, kv_heads * (shape.key_dim + shape.value_dim)
    batched = min(4 * tokens, BATCH_ROWS)  # a batch pads each part to a multiple of 4 rows
    rows = max(tokens, batched)
    keys = max(rows, context_tokens)
    most_scores, block_bytes = 4 * heads * rows * keys, SCORE_BYTES_ELSEWHERE
    if device_type == "cpu":
        # The kernel computes in fp32, with one size of keys and values.
        copies = 4 * (rows * query_width + keys * key_width) if size < 4 else 0
        copies += 4 * widest * (rows * heads + 2 * keys * kv_heads) if shape.key_dim != shape.value_dim else 0
        block_bytes = SCORE_BYTES
    else:
        copies = keys * heads * (shape.key_dim + shape.value_dim) * size  # repeated for GQA
    scores = _SCORE_TENSORS * min(most_scores, max(block_bytes, 4 * heads * keys))
    if device_type == "cpu" and not layer.softcap:
        scores = 4 * _BLOCK_QUERIES * (_BLOCK_KEYS + widest + 2) * torch.get_num_threads()
    gathered = size * (batched * (query_width + key_width) + context_tokens * key_width)
    results = 4 * heads * (widest + 1) * (tokens + rows)
    masks = _MASK_BYTES * min(tokens * max(tokens, context_tokens), MASK_NUMBERS)
    # Copies of operands are freed before the results of a batch are copied twice, to select those of its tokens.
    copies = max(copies, 8 * batched * heads * widest)
    return _scaled_queries_bytes(layer, tokens) + gathered + results + copies + masks + scores


def _calls_bytes(layer: AttentionLayer, tokens: int, context_tokens: int) -> int:
    shape = layer.shape
    size, head_dim = shape.dtype.itemsize, max(shape.key_dim, shape.value_dim)
    head_dim = -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    key_bytes = 2 * shape.kv_heads * head_dim * size
    query_bytes = layer.heads * head_dim * size
    # All operands in the layout of the kernel, and the rows of one call; its result, in fp32 and merged with others.
    operands = 2 * tokens * (query_bytes + key_bytes) + tokens * query_bytes
    results = 3 * 4 * tokens * layer.heads * (head_dim + 1)
    # A node gathers at most the keys before it that it sees, and a call keys of several nodes up to a limit.
    before = min(layer.past.window or context_tokens, tokens + context_tokens)
    gathered = min(tokens * before * key_bytes, max(GATHERED_BYTES, (tokens + before) * key_bytes))
    return _scaled_queries_bytes(layer, tokens) + operands + results + 2 * gathered


def _scaled_queries_bytes(layer: AttentionLayer, tokens: int) -> int:
    is_scaled = layer.temperature is not None
    return tokens * layer.heads * layer.shape.key_dim * layer.shape.dtype.itemsize if is_scaled else 0
