"""The view of a step shows its trie and the cached blocks before it, in numbers of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.sizes.architecture import Architecture, Attention, Layer
from moepass.runtime.serving.batching.pack import pack
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.engine.step_view import StepWatch, cached_tokens, step_nodes
from moepass.runtime.serving.requests.view import EngineView, StepNode
from tests.helpers.serving.naive_packing import caches_for, requests_to_pack

TABLE = FlopsTable(Architecture("test", "test", 8, 50, "fp32", (Layer(Attention("full", 2, 1, 4, 4), None, 16),)))


@st.composite
def batches(draw: Any) -> StepBatch:
    requests = draw(requests_to_pack())
    cache = draw(caches_for(requests))
    return pack(requests, TABLE, [cache.match(request) for request in requests]).batch


def path(nodes: tuple[StepNode, ...], number: int) -> list[int]:
    nodes_on_path = [number]
    while (number := nodes[number].parent) >= 0:
        nodes_on_path.append(number)
    return nodes_on_path[::-1]


@settings(max_examples=50)
@given(batches())
def test_the_nodes_are_the_trie_on_top_of_the_cache(batch: StepBatch) -> None:
    nodes, left_out = step_nodes(batch, most=10_000)
    assert left_out == 0
    assert all(node.parent < number for number, node in enumerate(nodes))
    assert sum(node.tokens for node in nodes if not node.is_cached) == batch.count
    assert sum(node.tokens for node in nodes if node.is_cached) == cached_tokens(batch)
    assert sum(node.reads for node in nodes) == len(batch.output_positions)
    # The depth of every computed node is the number of tokens above it.
    shown = sorted(
        (sum(nodes[above].tokens for above in path(nodes, number)[:-1]), node.tokens)
        for number, node in enumerate(nodes)
        if not node.is_cached
    )
    assert shown == sorted((int(batch.depth[node.start]), node.end - node.start) for node in batch.nodes)
    # The cached nodes are the distinct prefixes of the chains, so every chain ends with a cached node.
    ends = {
        sum(nodes[ancestor].tokens for ancestor in path(nodes, number))
        for number, node in enumerate(nodes)
        if node.is_cached
    }
    assert {BLOCK_TOKENS * len(chain) for chain in batch.contexts} <= ends


@settings(max_examples=30)
@given(batches(), st.integers(0, 6))
def test_what_is_too_much_is_left_out_from_below(batch: StepBatch, most: int) -> None:
    all_nodes, _ = step_nodes(batch, most=10_000)
    nodes, left_out = step_nodes(batch, most)
    assert nodes == all_nodes[:most]
    assert left_out == len(all_nodes) - len(nodes)


def test_an_engine_shows_its_last_step_until_it_forgets() -> None:
    watch = StepWatch(BlockIndex(3), 64)
    nothing = EngineView(None, 3, 0, 0, 64)
    assert watch.view() == nothing
    empty = np.empty(0, np.int64)
    watch.packed(StepBatch(empty, empty, empty, (), (), empty, ()))
    watch.ended(StepResult((), (), (), 7, 8, 9, 0.5, 0.0), 2)
    step = watch.view().step
    assert step is not None
    assert (step.number, step.requests, step.tokens, step.flops, step.unshared_flops) == (1, 2, 7, 8, 9)
    assert step.age_seconds >= 0
    watch.forget()
    assert watch.view() == nothing
