"""The computed tokens of a trie as a stream in depth-first order.

A part is a range of tokens of one node that the step computes. It follows the part above it if the two adjoin.
Otherwise it is a root of the stream and follows a chain of cached blocks, even if the step computes tokens further up
too: it reads those tokens from the cache, so it must not be their descendant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.computed_parts import ComputedParts
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices, StepBatch, TrieNode
from moepass.runtime.serving.requests.token_trie import TokenTrie


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TrieStream:
    """The stream of a step.

    Attributes:
        batch: the step, without output positions and blocks to store.
        part_starts: [nodes of the trie] index in the stream at which each computed part of the node begins.
        previous: [n] index in the stream of the token before each token, -1 for the first token of a root.
        branches: [n] how many branches of the step contain each token.
    """

    batch: StepBatch
    part_starts: list[tuple[int, ...]]
    previous: Indices
    branches: Indices


class _StreamPart(NamedTuple):
    """Positions [begin, end) of `node`.

    Attributes:
        first_token: index among the trie's tokens of the first token of the part.
        parent: index in the stream's list of parts, -1 for a root.
        context: index of the chain of cached blocks before the root, -1 for none.
    """

    first_token: int
    node: int
    begin: int
    end: int
    parent: int
    context: int


def trie_stream(trie: TokenTrie, computed: ComputedParts, chains: CachedChains) -> TrieStream:
    """Return the stream of the `computed` parts of `trie`; roots follow their `chains` of cached blocks."""
    roots, contexts = _roots(trie, computed, chains)
    parts = _depth_first(trie, computed, roots)
    lengths = np.array([stream_part.end - stream_part.begin for stream_part in parts], np.int64)
    stops = np.cumsum(lengths)
    starts = stops - lengths
    subtree_ends, branches = _subtrees(parts, stops.tolist())

    def per_token(values: Sequence[int] | Indices) -> Indices:
        """Return the value of its part for each token of the stream."""
        return np.repeat(np.asarray(values, np.int64), lengths)

    count = int(lengths.sum())
    offsets = np.arange(count) - per_token(starts)
    previous = np.arange(-1, count - 1)
    # The index -1 of a root's parent selects the appended -1.
    previous[starts] = np.append(stops - 1, -1)[np.array([stream_part.parent for stream_part in parts], np.int64)]
    batch = StepBatch(
        tokens=trie.tokens[per_token([stream_part.first_token for stream_part in parts]) + offsets].astype(np.int64),
        depth=per_token([stream_part.begin for stream_part in parts]) + offsets,
        subtree_end=per_token(subtree_ends),
        nodes=_nodes(parts, starts.tolist(), stops.tolist(), subtree_ends.tolist()),
        contexts=contexts,
        output_positions=NO_INDICES,
        stored=(),
    )
    start_of = {
        (stream_part.node, stream_part.begin): start for stream_part, start in zip(parts, starts.tolist(), strict=True)
    }
    part_starts = [tuple(start_of[node, begin] for begin, _ in ranges) for node, ranges in enumerate(computed.parts)]
    return TrieStream(batch, part_starts, previous, per_token(branches))


def _roots(
    trie: TokenTrie, computed: ComputedParts, chains: CachedChains
) -> tuple[list[_StreamPart], tuple[tuple[int, ...], ...]]:
    """Return the parts that follow no other part, and the chains of cached blocks before them."""
    detached = []
    for node, ranges in enumerate(computed.parts):
        parent_ranges = computed.parts[trie.parents[node]] if trie.parents[node] >= 0 else ()
        for begin, end in ranges:
            follows_parent = begin == trie.depths[node] and bool(parent_ranges) and parent_ranges[-1][1] == begin
            if not follows_parent:
                detached.append((trie.starts[node] + begin - trie.depths[node], node, begin, end))
    roots: list[_StreamPart] = []
    context_of: dict[tuple[int, int], int] = {}
    contexts: list[tuple[int, ...]] = []
    for first_token, node, begin, end in sorted(detached):
        context = -1
        if begin:
            piece, count = computed.cut_pieces[node, begin], begin // BLOCK_TOKENS
            # The last block of a chain identifies all blocks before it.
            name = (count, chains.last(piece, count))
            if name not in context_of:
                context_of[name] = len(contexts)
                contexts.append(chains.first_blocks(piece, count))
            context = context_of[name]
        roots.append(_StreamPart(first_token, node, begin, end, -1, context))
    # Roots with the same context are adjacent, so that it is read once.
    return sorted(roots, key=lambda root: root.context), tuple(contexts)


def _depth_first(trie: TokenTrie, computed: ComputedParts, roots: list[_StreamPart]) -> list[_StreamPart]:
    children = trie.children()
    parts: list[_StreamPart] = []
    stack = roots[::-1]
    while stack:
        stream_part = stack.pop()
        if stream_part.end == trie.ends[stream_part.node]:
            for child in reversed(children[stream_part.node]):
                begin, end = next(iter(computed.parts[child]), (-1, -1))
                if begin == stream_part.end:
                    stack.append(_StreamPart(trie.starts[child], child, begin, end, len(parts), stream_part.context))
        parts.append(stream_part)
    return parts


def _subtrees(parts: list[_StreamPart], stops: list[int]) -> tuple[Indices, Indices]:
    """Return for each part where its last descendant ends in the stream, and how many leaves are below it."""
    ends = list(stops)
    branches = [0] * len(parts)
    for number in reversed(range(len(parts))):
        parent = parts[number].parent
        branches[number] = branches[number] or 1
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
            branches[parent] += branches[number]
    return np.array(ends, np.int64), np.array(branches, np.int64)


def _nodes(
    parts: list[_StreamPart], starts: list[int], stops: list[int], subtree_ends: list[int]
) -> tuple[TrieNode, ...]:
    """Return the nodes of the step. An only child continues the node of its parent."""
    child_counts = [0] * len(parts)
    for stream_part in parts:
        if stream_part.parent >= 0:
            child_counts[stream_part.parent] += 1
    nodes: list[TrieNode] = []
    node_of: list[int] = []
    for stream_part, start, stop, subtree_end in zip(parts, starts, stops, subtree_ends, strict=True):
        if stream_part.parent >= 0 and child_counts[stream_part.parent] == 1:
            node_of.append(node_of[stream_part.parent])
            nodes[-1] = dataclasses.replace(nodes[-1], end=stop)
            continue
        parent = node_of[stream_part.parent] if stream_part.parent >= 0 else -1
        node_of.append(len(nodes))
        nodes.append(TrieNode(start, stop, parent, subtree_end, stream_part.context))
    return tuple(nodes)
