"""The computed parts of a trie as a stream in depth-first order.

A part follows the part above it where nothing between the two comes from the cache; otherwise it is a root and hangs on
the cached blocks before it, even if tokens further up are computed too: those it sees in the cache, so it must not
stand among their descendants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.computed_parts import ComputedParts
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.step_batch import (
    BLOCK_TOKENS,
    NO_INDICES,
    Indices,
    StepBatch,
    TrieNode,
)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TrieStream:
    """A batch without places and blocks to store.

    part_starts    per node of the trie: where its computed parts begin in the stream
    previous       [n] where the token before each stands, -1 for the first one of a root
    branches       [n] branches of the step's trie that hang on each token; 1 where none branches off behind it
    """

    batch: StepBatch
    part_starts: list[list[int]]
    previous: Indices
    branches: Indices


class _Part(NamedTuple):
    """Positions [begin, end) of a node; the first of their tokens came first at `label` among all tokens."""

    label: int
    node: int
    begin: int
    end: int


@dataclasses.dataclass(eq=False, slots=True)
class _Forest:
    """The parts in the order in which they came first; each with the part above it, those below, and its context."""

    parts: list[_Part]
    parents: list[int]
    children: list[list[int]]
    contexts: dict[tuple[int, int], int]
    root_contexts: dict[int, int]
    chains: list[tuple[int, ...]]


def trie_stream(trie: PieceTrie, computed: ComputedParts, chains: CachedChains) -> TrieStream:
    forest = _forest(trie, computed, chains)
    parts = forest.parts
    order, starts = _depth_first(forest)
    subtree_ends, branches = _subtrees(forest, order, starts)
    part_starts: list[list[int]] = [[] for _ in trie.starts]
    for part, start in sorted(zip(parts, starts, strict=True), key=lambda one: one[0].begin):
        part_starts[part.node].append(start)

    lengths = np.array([parts[number].end - parts[number].begin for number in order], np.int64)

    def per_token(values: Sequence[int]) -> Indices:
        """Of one value per part, one value per token of the stream."""
        return np.repeat(np.array(values, np.int64)[order], lengths) if order else NO_INDICES

    count = int(lengths.sum())
    offsets = np.arange(count) - per_token(starts)
    previous = np.arange(-1, count - 1)
    for number, parent in enumerate(forest.parents):
        last = -1 if parent < 0 else starts[parent] + parts[parent].end - parts[parent].begin - 1
        previous[starts[number]] = last
    batch = StepBatch(
        tokens=trie.tokens[per_token([part.label for part in parts]) + offsets].astype(np.int64),
        depth=per_token([part.begin for part in parts]) + offsets,
        subtree_end=per_token(subtree_ends),
        nodes=_nodes(forest, order, starts, subtree_ends),
        contexts=tuple(forest.chains),
        places=NO_INDICES,
        stored=(),
    )
    return TrieStream(batch, part_starts, previous, per_token(branches))


def _forest(trie: PieceTrie, computed: ComputedParts, chains: CachedChains) -> _Forest:
    parts = sorted(
        _Part(trie.starts[node] + begin - trie.depths[node], node, begin, end)
        for node, of_node in enumerate(computed.parts)
        for begin, end in of_node
    )
    forest = _Forest(parts, [], [[] for _ in parts], {}, {}, [])
    last_parts = {part.node: number for number, part in enumerate(parts) if part.end == trie.ends[part.node]}
    for number, part in enumerate(parts):
        parent = last_parts.get(trie.parents[part.node], -1) if part.begin == trie.depths[part.node] else -1
        forest.parents.append(parent)
        if parent >= 0:
            forest.children[parent].append(number)
        elif part.begin == 0:
            forest.root_contexts[number] = -1
        else:
            piece, count = computed.cut_pieces[part.node, part.begin], part.begin // BLOCK_TOKENS
            name = (count, chains.last(piece, count))
            if name not in forest.contexts:
                forest.contexts[name] = len(forest.chains)
                forest.chains.append(chains.first_blocks(piece, count))
            forest.root_contexts[number] = forest.contexts[name]
    return forest


def _depth_first(forest: _Forest) -> tuple[list[int], list[int]]:
    """The parts in depth-first order, and where each begins in the stream."""
    order: list[int] = []
    starts = [0] * len(forest.parts)
    at = 0
    # Roots that share a context stand next to each other, so that it is read once.
    stack = sorted(forest.root_contexts, key=lambda number: (forest.root_contexts[number], number), reverse=True)
    while stack:
        number = stack.pop()
        order.append(number)
        starts[number] = at
        at += forest.parts[number].end - forest.parts[number].begin
        stack += reversed(forest.children[number])
    return order, starts


def _subtrees(forest: _Forest, order: Sequence[int], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each part: where its last descendant ends in the stream, and how many parts without children are below it."""
    ends = [0] * len(order)
    branches = [0] * len(order)
    for number in reversed(order):
        part, children = forest.parts[number], forest.children[number]
        ends[number] = ends[children[-1]] if children else starts[number] + part.end - part.begin
        branches[number] = sum(branches[child] for child in children) if children else 1
    return ends, branches


def _nodes(
    forest: _Forest, order: Sequence[int], starts: Sequence[int], subtree_ends: Sequence[int]
) -> tuple[TrieNode, ...]:
    """Parts become nodes, and an only child continues its parent's node."""
    nodes: list[TrieNode] = []
    node_of: dict[int, int] = {}
    for number in order:
        part, parent = forest.parts[number], forest.parents[number]
        end = starts[number] + part.end - part.begin
        if parent >= 0 and len(forest.children[parent]) == 1:
            node_of[number] = node_of[parent]
            nodes[-1] = dataclasses.replace(nodes[-1], end=end)
            continue
        node_of[number] = len(nodes)
        above = node_of[parent] if parent >= 0 else -1
        context = nodes[above].context if parent >= 0 else forest.root_contexts[number]
        nodes.append(TrieNode(starts[number], end, above, subtree_ends[number], context))
    return tuple(nodes)
