"""The trie of a step in sizes, for those who look.

Pseudo-code
    blocks of the cache that the step hangs on become nodes: a run of blocks without a branch is one
    the step's own nodes hang on these, or begin a sequence
    from the roots down, level by level, as many as may be shown
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.view import EngineView, StepNode, StepView

MOST_NODES = 256


class StepWatch:
    """Keeps what the last step was until somebody looks, which a step itself does not wait for.

    One thread runs steps, another one may look.
    """

    def __init__(self, index: BlockIndex, block_bytes: int) -> None:
        self._index, self._block_bytes = index, block_bytes
        self._packed: StepBatch | None = None
        self._last: _EndedStep | None = None
        self._number = 0

    def packed(self, batch: StepBatch) -> None:
        """This is what runs now; of a step that is split, its last part is what is seen."""
        self._packed = batch

    def ended(self, result: StepResult, requests: int) -> None:
        self._number += 1
        if self._packed is not None:
            self._last = _EndedStep(self._number, time.monotonic(), self._packed, result, requests)

    def forget(self) -> None:
        """Steps are counted anew."""
        self._packed = self._last = None
        self._number = 0

    def look(self) -> EngineView:
        index = self._index
        return EngineView(
            None if self._last is None else self._last.view(),
            index.block_count,
            len(index),
            index.used,
            self._block_bytes,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _EndedStep:
    number: int
    ended: float
    batch: StepBatch
    result: StepResult
    requests: int

    def view(self) -> StepView:
        nodes, left_out = step_nodes(self.batch)
        result = self.result
        return StepView(
            self.number,
            time.monotonic() - self.ended,
            self.requests,
            result.tokens,
            cached_tokens(self.batch),
            result.flops,
            result.unshared_flops,
            result.seconds,
            nodes,
            left_out,
        )


def step_nodes(batch: StepBatch, most: int = MOST_NODES) -> tuple[tuple[StepNode, ...], int]:
    """The first `most` nodes of the step's trie, level by level, and how many there are beside them."""
    nodes, ends = _cached_nodes(batch.contexts)
    first = len(nodes)
    starts = [node.start for node in batch.nodes]
    stops = [node.end for node in batch.nodes]
    reads = np.searchsorted(batch.places, stops) - np.searchsorted(batch.places, starts)
    for node, count in zip(batch.nodes, reads.tolist(), strict=True):
        parent = first + node.parent if node.parent >= 0 else ends[node.context] if node.context >= 0 else -1
        nodes.append(StepNode(parent, node.end - node.start, False, count))
    return _by_level(nodes, most)


def cached_tokens(batch: StepBatch) -> int:
    """Distinct tokens of the cache that the step reads."""
    return BLOCK_TOKENS * len({block for context in batch.contexts for block in context})


def _cached_nodes(contexts: Sequence[Sequence[int]]) -> tuple[list[StepNode], list[int]]:
    """Nodes of the chains of blocks, and for each chain the node that it ends with."""
    # A block stands behind the same one in every chain. Both in the order in which they are met: parents first.
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
    sizes: list[int] = []
    for block, previous in before.items():
        if previous >= 0 and children[previous] == 1 and previous not in last:
            node_of[block] = node_of[previous]
            sizes[node_of[block]] += BLOCK_TOKENS
        else:
            node_of[block] = len(nodes)
            nodes.append(StepNode(node_of[previous], 0, True, 0))
            sizes.append(BLOCK_TOKENS)
    sized = [StepNode(node.parent, size, True, 0) for node, size in zip(nodes, sizes, strict=True)]
    return sized, [node_of[context[-1]] for context in contexts]


def _by_level(nodes: Sequence[StepNode], most: int) -> tuple[tuple[StepNode, ...], int]:
    children: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(number)
    place = {-1: -1}
    shown: list[StepNode] = []
    waiting = collections.deque(children.get(-1, ()))
    while waiting and len(shown) < most:
        number = waiting.popleft()
        node = nodes[number]
        place[number] = len(shown)
        shown.append(StepNode(place[node.parent], node.tokens, node.is_cached, node.reads))
        waiting.extend(children.get(number, ()))
    return tuple(shown), len(nodes) - len(shown)
