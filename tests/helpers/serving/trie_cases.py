"""Random steps for attention over a trie: their sequences, the layer, and its tensors."""

from __future__ import annotations

import dataclasses

import torch

from moepass.runtime.serving.attention.running_step import RunningStep
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape
from tests.helpers.serving.naive_trie import naive_step

# The index of the layer, and the factor of its scores.
LAYER, SCALING = 7, 0.3


@dataclasses.dataclass(frozen=True)
class TrieCase:
    """Sequences of a step, with the number of cached leading tokens of each, and an attention layer."""

    sequences: tuple[tuple[int, ...], ...]
    cached_tokens: tuple[int, ...]
    kv_heads: int
    groups: int
    key_dim: int
    value_dim: int
    past: VisiblePast
    softcap: float
    has_sinks: bool
    dtype: torch.dtype = torch.float32


def trie_setting(
    case: TrieCase, device: torch.device | str = "cpu"
) -> tuple[StepBatch, RunningStep, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Return the step, the running step on `device`, and the keys and values of the cached blocks, on the CPU."""
    cached: dict[tuple[int, ...], int] = {}
    for sequence, count in zip(case.sequences, case.cached_tokens, strict=False):
        for end in range(BLOCK_TOKENS, min(count, len(sequence)) + 1, BLOCK_TOKENS):
            cached.setdefault(sequence[:end], len(cached))
    step, _ = naive_step(case.sequences, cached)
    shape = KeyValueShape(case.kv_heads, case.key_dim, case.value_dim, case.dtype)
    layer = AttentionLayer(0, case.kv_heads * case.groups, shape, case.past)
    memory = BlockMemory([shape], max(len(cached), 1), device)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*memory.keys, *memory.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    keys, values = memory.keys[0].cpu(), memory.values[0].cpu()
    blocks = {block: (keys[block], values[block]) for block in cached.values()}
    return step, RunningStep(step, {LAYER: layer}, memory, device), blocks


def trie_tensors(case: TrieCase, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return random queries, keys, values and sinks of `count` tokens, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(1, count, heads, dim, generator=generator).transpose(1, 2).to(case.dtype)

    heads = case.kv_heads * case.groups
    query, key, value = (
        drawn(heads, case.key_dim),
        drawn(case.kv_heads, case.key_dim),
        drawn(case.kv_heads, case.value_dim),
    )
    return query, key, value, torch.randn(heads, generator=generator).to(case.dtype) if case.has_sinks else None
