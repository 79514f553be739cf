"""The operator `moepass::trie_attention` against one dense mask, on random tries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dense_attention import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_trie import naive_step

from moepass.runtime.serving.attention import partial_attention, trie_parts
from moepass.runtime.serving.attention.attention_layers import AttentionLayer
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape, block_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    sequences: tuple[tuple[int, ...], ...]
    cached_tokens: tuple[int, ...]  # of each sequence, how many of its first tokens are cached
    kv_heads: int
    groups: int
    key_dim: int
    value_dim: int
    past: VisiblePast
    softcap: float
    has_sinks: bool
    call_flops: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Few different tokens, so that prefixes meet; some sequences continue others.
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)
    sequences = draw(st.lists(tokens, min_size=1, max_size=6))
    for number in draw(st.lists(st.integers(0, len(sequences) - 1), max_size=4)):
        sequences.append(sequences[number] + draw(tokens))
    return Case(
        tuple(dict.fromkeys(sequences)),
        tuple(draw(st.lists(st.sampled_from([0, 0, 16, 32, 48]), min_size=10, max_size=10))),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        8,
        draw(st.sampled_from([4, 8, 16])),
        draw(
            st.one_of(
                st.just(VisiblePast()),
                st.integers(1, 90).map(lambda window: VisiblePast(window=window)),
                st.integers(1, 90).map(lambda chunk: VisiblePast(chunk=chunk)),
            )
        ),
        draw(st.sampled_from([0.0, 0.0, 2.0])),
        draw(st.booleans()),
        # Every way of grouping: a part for each node, as predicted for real sizes, few parts, one.
        draw(st.sampled_from([0, 2_000, 100_000, 1 << 40])),
    )


def _setting(case: Case) -> tuple[StepBatch, RunningStep, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    cached: dict[tuple[int, ...], int] = {}
    for sequence, count in zip(case.sequences, case.cached_tokens, strict=False):
        for end in range(BLOCK_TOKENS, min(count, len(sequence)) + 1, BLOCK_TOKENS):
            cached.setdefault(sequence[:end], len(cached))
    step, _ = naive_step(case.sequences, cached)
    shape = KeyValueShape(case.kv_heads, case.key_dim, case.value_dim, torch.float32)
    layer = AttentionLayer(0, case.kv_heads * case.groups, shape, case.past)
    memory = BlockMemory([shape], block_bytes([shape]) * max(len(cached), 1))
    generator = torch.Generator().manual_seed(1)
    for tensor in (*memory.keys, *memory.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    blocks = {block: (memory.keys[0][block], memory.values[0][block]) for block in cached.values()}
    return step, RunningStep(step, {7: layer}, memory), blocks


def _tensors(case: Case, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(1, count, heads, dim, generator=generator).transpose(1, 2)

    heads = case.kv_heads * case.groups
    query, key, value = (
        drawn(heads, case.key_dim),
        drawn(case.kv_heads, case.key_dim),
        drawn(case.kv_heads, case.value_dim),
    )
    return query, key, value, torch.randn(heads, generator=generator) if case.has_sinks else None


def _check(case: Case) -> None:
    step, running, blocks = _setting(case)
    query, key, value, sinks = _tensors(case, step.count)
    expected = dense_attention(
        step, query, key, value, blocks, 0.3, case.past.window, case.past.chunk, case.softcap, sinks
    )
    with running_step(running):
        found = torch.ops.moepass.trie_attention(query, key, value, sinks, 7, 0.3, case.softcap)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_trie_gives_what_one_dense_mask_gives(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_parts, "CALL_FLOPS", case.call_flops)
        patch.setattr(partial_attention, "SCORE_BYTES", 1000)  # several blocks of queries
        patch.setattr(trie_parts, "MASK_NUMBERS", 300)
        patch.setattr(trie_parts, "LEAST_PIECE", 16)
        _check(case)
