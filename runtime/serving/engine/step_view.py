"""The trie of a step in numbers of tokens, for the status page.

Pseudo-code
    cached blocks before the step become nodes: a run of blocks without a branch is one node
    the step's own nodes follow them, or begin a sequence
    nodes are listed level by level from the roots, up to a limit
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import numpy as np

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.view import EngineView, StepNode, StepView

MOST_NODES = 256


class StepWatch:
    """Keeps the last step until another thread asks for its view, so that a step does not spend time on it."""

    def __init__(self, index: BlockIndex, block_bytes: int) -> None:
        self._index, self._block_bytes = index, block_bytes
        self._packed: StepBatch | None = None
        self._last: Callable[[], StepView] | None = None
        self._number = 0

    def packed(self, batch: StepBatch) -> None:
        """Record the running step. If a step is split, the last part is shown."""
        self._packed = batch

    def ended(self, result: StepResult, requests: int) -> None:
        """Record the result of the step."""
        self._number += 1
        if self._packed is not None:
            self._last = functools.partial(_view, self._number, time.monotonic(), self._packed, result, requests)

    def forget(self) -> None:
        """Forget all steps and restart their numbering."""
        self._packed = self._last = None
        self._number = 0

    def view(self) -> EngineView:
        """Return the view of the last step and the cache."""
        index, step = self._index, None if self._last is None else self._last()
        return EngineView(step, index.block_count, len(index), index.used, self._block_bytes)


def _view(number: int, ended: float, batch: StepBatch, result: StepResult, requests: int) -> StepView:
    nodes, left_out = step_nodes(batch)
    costs = result.tokens, cached_tokens(batch), result.flops, result.unshared_flops, result.seconds
    return StepView(number, time.monotonic() - ended, requests, *costs, nodes, left_out)


def step_nodes(batch: StepBatch, most: int = MOST_NODES) -> tuple[tuple[StepNode, ...], int]:
    """Return the first `most` nodes of the step's trie, level by level, and the number of omitted nodes."""
    nodes, ends = _cached_nodes(batch.contexts)
    first = len(nodes)
    starts = [node.start for node in batch.nodes]
    stops = [node.end for node in batch.nodes]
    reads = np.searchsorted(batch.output_positions, stops) - np.searchsorted(batch.output_positions, starts)
    for node, count in zip(batch.nodes, reads.tolist(), strict=True):
        parent = first + node.parent if node.parent >= 0 else ends[node.context] if node.context >= 0 else -1
        nodes.append(StepNode(parent, node.end - node.start, False, count))
    return _by_level(nodes, most)


def cached_tokens(batch: StepBatch) -> int:
    """Return the number of distinct cached tokens that the step reads."""
    return BLOCK_TOKENS * len({block for context in batch.contexts for block in context})


def _cached_nodes(contexts: Sequence[Sequence[int]]) -> tuple[list[StepNode], list[int]]:
    """Return the nodes of the chains of blocks, and the last node of each chain."""
    # A block has the same predecessor in every chain. Blocks are collected in order, so parents come first.
    before: dict[int, int] = {}
    children: collections.Counter[int] = collections.Counter()
    for context in contexts:
        for previous, block in zip((-1, *context), context, strict=False):
            if block not in before:
                before[block] = previous
                children[previous] += 1
    last = {context[-1] for context in contexts}
    nodes: list[StepNode] = []
    node_of = {-1: -1}
    for block, previous in before.items():
        if previous >= 0 and children[previous] == 1 and previous not in last:
            number = node_of[block] = node_of[previous]
            nodes[number] = dataclasses.replace(nodes[number], tokens=nodes[number].tokens + BLOCK_TOKENS)
        else:
            node_of[block] = len(nodes)
            nodes.append(StepNode(node_of[previous], BLOCK_TOKENS, True, 0))
    return nodes, [node_of[context[-1]] for context in contexts]


def _by_level(nodes: Sequence[StepNode], most: int) -> tuple[tuple[StepNode, ...], int]:
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    shown_index = {-1: -1}
    shown: list[StepNode] = []
    waiting = collections.deque(children.get(-1, ()))
    while waiting and len(shown) < most:
        index = waiting.popleft()
        shown_index[index] = len(shown)
        shown.append(dataclasses.replace(nodes[index], parent=shown_index[nodes[index].parent]))
        waiting.extend(children.get(index, ()))
    return tuple(shown), len(nodes) - len(shown)
