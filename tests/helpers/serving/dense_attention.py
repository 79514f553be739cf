"""Attention of a step by one mask over all tokens and all cached ones: the reference, O(n^2) memory."""

from __future__ import annotations

import torch

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch


def dense_attention(
    step: StepBatch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [1, heads, n, dim] x [1, kv_heads, n, dim] → [1, n, heads, value_dim], computed in fp64.

    `cached` contains the keys and values of each block, [BLOCK_TOKENS, kv_heads, dim].
    """
    position, depth, end = torch.arange(step.count), torch.as_tensor(step.depth), torch.as_tensor(step.subtree_end)
    keys, values = [key[0].transpose(0, 1)], [value[0].transpose(0, 1)]
    sees = [(position <= position[:, None]) & (position[:, None] < end)]
    key_depth = [depth]
    for number, chain in enumerate(step.contexts):
        hangs_on = torch.zeros(step.count, dtype=torch.bool)
        for node in step.nodes:
            hangs_on[node.start : node.end] |= node.context == number
        for index, block in enumerate(chain):
            keys.append(cached[block][0])
            values.append(cached[block][1])
            sees.append(hangs_on[:, None].expand(-1, BLOCK_TOKENS))
            key_depth.append(torch.arange(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS))
    visible, key_depths = torch.cat(sees, 1), torch.cat(key_depth)
    if window:
        visible = visible & (key_depths > depth[:, None] - window)
    if chunk:
        visible = visible & (key_depths // chunk == depth[:, None] // chunk)
    groups = query.shape[1] // key.shape[1]
    all_keys, all_values = (torch.cat(tensors).double().repeat_interleave(groups, 1) for tensors in (keys, values))
    scores = torch.einsum("hqd,khd->hqk", query[0].double(), all_keys) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, step.count, 1)], 2)
    weights = scores.softmax(-1)[..., : len(key_depths)]
    return torch.einsum("hqk,khd->qhd", weights, all_values)[None]
