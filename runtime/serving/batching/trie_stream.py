"""The computed parts of a trie as a stream in depth-first order.

A part follows the part above it where nothing between the two comes from the cache; otherwise it is a root and hangs on
the cached blocks before it, even if tokens further up are computed too: those it sees in the cache, so it must not
stand among their descendants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
    part_starts: list[tuple[int, ...]]
    previous: Indices
    branches: Indices


@dataclasses.dataclass(eq=False, slots=True)
class _Forest:
    """Lists have an entry per part, in the order in which parts came first among the tokens of all pieces.

    A part is positions [begin, end) of a node; `labels` says where its tokens came first. `parents` is the part above
    it, -1 for a root. Children of a part are `first_children` and then `next_siblings` until -1.
    """

    labels: list[int]
    nodes: list[int]
    begins: list[int]
    lengths: list[int]
    parents: list[int]
    first_children: list[int]
    next_siblings: list[int]
    root_contexts: dict[int, int]
    chains: list[tuple[int, ...]]


def trie_stream(trie: PieceTrie, computed: ComputedParts, chains: CachedChains) -> TrieStream:
    forest = _forest(trie, computed, chains)
    order, starts = _depth_first(forest)
    ends, branches = _subtrees(forest, order, starts)
    lengths = np.array(forest.lengths, np.int64)[order]

    def per_token(values: Sequence[int]) -> Indices:
        """Of one value per part, one value per token of the stream."""
        return np.repeat(np.array(values, np.int64)[order], lengths)

    count = int(lengths.sum())
    offsets = np.arange(count) - per_token(starts)
    previous = np.arange(-1, count - 1)
    lasts = [starts[one] + forest.lengths[one] - 1 if one >= 0 else -1 for one in forest.parents]
    previous[starts] = lasts
    batch = StepBatch(
        tokens=trie.tokens[per_token(forest.labels) + offsets].astype(np.int64),
        depth=per_token(forest.begins) + offsets,
        subtree_end=per_token(ends),
        nodes=_nodes(forest, order, starts, ends),
        contexts=tuple(forest.chains),
        places=NO_INDICES,
        stored=(),
    )
    part_starts: list[tuple[int, ...]] = [()] * len(trie.starts)
    # Parts of one node came in the order of their positions.
    for node, start in zip(forest.nodes, starts, strict=True):
        part_starts[node] = (*part_starts[node], start)
    return TrieStream(batch, part_starts, previous, per_token(branches))


def _forest(trie: PieceTrie, computed: ComputedParts, chains: CachedChains) -> _Forest:
    parts = sorted(
        (trie.starts[node] + begin - trie.depths[node], node, begin, end)
        for node, of_node in enumerate(computed.parts)
        for begin, end in of_node
    )
    forest = _Forest(
        labels=[label for label, _, _, _ in parts],
        nodes=[node for _, node, _, _ in parts],
        begins=[begin for _, _, begin, _ in parts],
        lengths=[end - begin for _, _, begin, end in parts],
        parents=[-1] * len(parts),
        first_children=[-1] * len(parts),
        next_siblings=[-1] * len(parts),
        root_contexts={},
        chains=[],
    )
    last_parts = {node: number for number, (_, node, _, end) in enumerate(parts) if end == trie.ends[node]}
    contexts: dict[tuple[int, int], int] = {}
    for number, (_, node, begin, _) in enumerate(parts):
        parent = last_parts.get(trie.parents[node], -1) if begin == trie.depths[node] else -1
        if parent >= 0:
            forest.parents[number] = parent
        elif begin == 0:
            forest.root_contexts[number] = -1
        else:
            piece, count = computed.cut_pieces[node, begin], begin // BLOCK_TOKENS
            name = (count, chains.last(piece, count))
            if name not in contexts:
                contexts[name] = len(forest.chains)
                forest.chains.append(chains.first_blocks(piece, count))
            forest.root_contexts[number] = contexts[name]
    for number in reversed(range(len(parts))):
        parent = forest.parents[number]
        if parent >= 0:
            forest.next_siblings[number] = forest.first_children[parent]
            forest.first_children[parent] = number
    return forest


def _depth_first(forest: _Forest) -> tuple[list[int], list[int]]:
    """The parts in depth-first order, and where each begins in the stream."""
    order: list[int] = []
    starts = [0] * len(forest.labels)
    at = 0
    # Roots that share a context stand next to each other, so that it is read once.
    for root in sorted(forest.root_contexts, key=lambda root: (forest.root_contexts[root], root)):
        stack = [root]
        while stack:
            number = stack.pop()
            order.append(number)
            starts[number] = at
            at += forest.lengths[number]
            if forest.parents[number] >= 0 and forest.next_siblings[number] >= 0:
                stack.append(forest.next_siblings[number])
            if forest.first_children[number] >= 0:
                stack.append(forest.first_children[number])
    return order, starts


def _subtrees(forest: _Forest, order: Sequence[int], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each part: where its last descendant ends in the stream, and how many parts without children are below it."""
    ends = [start + length for start, length in zip(starts, forest.lengths, strict=True)]
    branches = [0] * len(order)
    for number in reversed(order):
        parent = forest.parents[number]
        branches[number] = branches[number] or 1
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
            branches[parent] += branches[number]
    return ends, branches


def _nodes(
    forest: _Forest, order: Sequence[int], starts: Sequence[int], subtree_ends: Sequence[int]
) -> tuple[TrieNode, ...]:
    """Parts become nodes, and an only child continues its parent's node."""
    nodes: list[TrieNode] = []
    node_of = [-1] * len(order)
    for number in order:
        parent = forest.parents[number]
        end = starts[number] + forest.lengths[number]
        is_only = parent >= 0 and forest.next_siblings[forest.first_children[parent]] < 0
        if is_only:
            node_of[number] = node_of[parent]
            nodes[-1] = dataclasses.replace(nodes[-1], end=end)
            continue
        node_of[number] = len(nodes)
        above = node_of[parent] if parent >= 0 else -1
        context = nodes[above].context if parent >= 0 else forest.root_contexts[number]
        nodes.append(TrieNode(starts[number], end, above, subtree_ends[number], context))
    return tuple(nodes)
