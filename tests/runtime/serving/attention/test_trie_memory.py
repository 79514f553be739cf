"""The bounds of attention's memory, compared with the tensors that it makes: real ones on a CPU, fake ones on CUDA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionLayer, Temperature
from moepass.runtime.serving.attention.trie_attention import trie_attention
from moepass.runtime.serving.attention.trie_memory import held_mask_bytes, trie_bytes
from moepass.runtime.serving.attention.trie_parts import VisiblePast
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch, TrieNode, uncached_step
from moepass.runtime.serving.cache.block_memory import BlockMemory, KeyValueShape
from tests.helpers.graphs.fake_allocations import fake_allocations
from tests.helpers.graphs.fake_gpu import pretended_gpu
from tests.helpers.models.peak_memory import peak_bytes

TOKENS = 1200
CONTEXT_BLOCKS = 20
# A bound is for the worst trie, which has parts of single tokens; others take down to a tenth of it.
WORST, FACTOR = "single tokens", 5


def _step(lengths: Sequence[int], root: int, has_context: bool = False) -> StepBatch:
    """Return a step of branches of these lengths after a root of `root` tokens, or after cached blocks."""
    nodes, start = [], root
    for length in lengths:
        nodes.append(TrieNode(start, start + length, 0 if root else -1, start + length))
        start += length
    if root:
        nodes.insert(0, TrieNode(0, root, -1, start))
    step = uncached_step(tuple(nodes), np.zeros(start, np.int64))
    if not has_context:
        return step
    nodes = [dataclasses.replace(node, context=0 if node.parent < 0 else node.context) for node in nodes]
    depth = step.depth + CONTEXT_BLOCKS * BLOCK_TOKENS
    return dataclasses.replace(step, nodes=tuple(nodes), depth=depth, contexts=(tuple(range(CONTEXT_BLOCKS)),))


def _caterpillar() -> StepBatch:
    """Return a sequence with a branch of one token after each of its tokens, so that a mask is cheapest."""
    nodes, count = [], TOKENS // 2
    for number in range(count):
        parent = 2 * number - 2 if number else -1
        nodes += [TrieNode(2 * number, 2 * number + 1, parent, 2 * count)]
        nodes += [TrieNode(2 * number + 1, 2 * number + 2, 2 * number, 2 * number + 2)]
    return uncached_step(tuple(nodes), np.zeros(2 * count, np.int64))


STEPS = {
    "one sequence": _step([TOKENS], 0),
    "branches": _step([100] * 8, 400),
    "single tokens": _step([1] * (TOKENS - 1), 1),
    "short branches": _step([29] * 40, 40),
    "cached prefix": _step([100] * 12, 0, has_context=True),
}
PLAIN = AttentionLayer(0, 16, KeyValueShape(4, 64, 64, torch.bfloat16), VisiblePast())
LAYERS = {
    "plain": PLAIN,
    "fp32": dataclasses.replace(PLAIN, shape=KeyValueShape(4, 64, 64, torch.float32)),
    "unequal sizes": dataclasses.replace(PLAIN, heads=4, shape=KeyValueShape(4, 72, 48, torch.bfloat16)),
    "window": dataclasses.replace(PLAIN, past=VisiblePast(window=100)),
    "chunks": dataclasses.replace(PLAIN, past=VisiblePast(chunk=100)),
    "soft cap": dataclasses.replace(PLAIN, softcap=20.0),
    "temperature": dataclasses.replace(PLAIN, temperature=Temperature(0.1, 8192.0)),
}


def _bound(layer: AttentionLayer, step: StepBatch, device: str) -> int:
    """Return the bound with the result of attention."""
    result = step.count * layer.heads * layer.shape.value_dim * layer.shape.dtype.itemsize
    context_tokens = CONTEXT_BLOCKS * BLOCK_TOKENS if step.contexts else 0
    return result + held_mask_bytes(step.count) + trie_bytes(layer, step.count, device, context_tokens)


def _attend(
    layer: AttentionLayer, step: StepBatch, device: str, tensors: list[torch.Tensor], memory: BlockMemory
) -> None:
    running = RunningStep(step, {0: layer}, memory if step.contexts else None, device)
    with running_step(running):
        trie_attention(*tensors, None, 0, 0.125, layer.softcap)


def _tensors(layer: AttentionLayer, step: StepBatch, device: str) -> list[torch.Tensor]:
    shape = layer.shape
    sizes = ((layer.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
    return [torch.zeros(1, heads, step.count, size, dtype=shape.dtype, device=device) for heads, size in sizes]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_cpu_allocates_no_more_than_the_bound(kind: str, name: str) -> None:
    layer, step = LAYERS[kind], STEPS[name]
    tensors, memory = _tensors(layer, step, "cpu"), BlockMemory([layer.shape], CONTEXT_BLOCKS)
    measured, bound = peak_bytes(lambda: _attend(layer, step, "cpu", tensors, memory)), _bound(layer, step, "cpu")
    assert measured <= bound
    if name == WORST:
        assert bound <= FACTOR * measured


def test_the_masks_of_a_cpu_are_within_the_bound() -> None:
    layer, step = PLAIN, _caterpillar()
    tensors, memory = _tensors(layer, step, "cpu"), BlockMemory([layer.shape], 1)
    measured = peak_bytes(lambda: _attend(layer, step, "cpu", tensors, memory))
    assert 4 * step.count**2 < measured <= _bound(layer, step, "cpu")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gpu_allocates_no_more_than_the_bound(kind: str, name: str) -> None:
    layer, step = LAYERS[kind], STEPS[name]
    with pretended_gpu():
        tensors, memory = _tensors(layer, step, "cuda"), BlockMemory([layer.shape], CONTEXT_BLOCKS, "cuda")
        with fake_allocations("cuda") as allocations:
            _attend(layer, step, "cuda", tensors, memory)
    bound = _bound(layer, step, "cuda")
    assert allocations.peak_bytes <= bound
    if kind in ("plain", "unequal sizes", "temperature") and not step.contexts:
        assert bound <= FACTOR * allocations.peak_bytes
