"""A step as data: the trie of all its tokens in depth-first order, and the cached blocks before its roots.

Token q sees token k exactly if `k <= q < subtree_end[k]`, and in addition the cached tokens of its branch. Its position
in its own sequence is `depth[q]`. A cache slot addresses one token in the cache: block * BLOCK_TOKENS + index of the
token in its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
NO_INDICES: Indices = np.empty(0, np.int64)

# Tokens of a cache block, as in the source of the method (arXiv 2605.02960).
BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class TrieNode:
    """Tokens [start, end) of the stream, a run without a branch.

    Attributes:
        parent: index of the node before it, -1 for a root.
        subtree_end: index in the stream right after the last descendant.
        context: index into `StepBatch.contexts` of the cached blocks before the root, -1 if the sequence begins with
            the root. Descendants have the context of their root.
    """

    start: int
    end: int
    parent: int
    subtree_end: int
    context: int = -1


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredBlock:
    """The cache block `block` that stores keys and values of the tokens at `positions` [BLOCK_TOKENS] of the stream."""

    block: int
    positions: Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """The input of one forward pass.

    Attributes:
        tokens: [n] token ids, in depth-first order of the trie.
        depth: [n] position of each token in its sequence, with the cached tokens before it.
        subtree_end: [n] index right after the last descendant of each token.
        nodes: the trie without its single-child chains, in depth-first order.
        contexts: chains of cached blocks before the roots, first tokens first.
        output_positions: [m] ascending positions in the stream whose output is read.
    """

    tokens: Indices
    depth: Indices
    subtree_end: Indices
    nodes: tuple[TrieNode, ...]
    contexts: tuple[tuple[int, ...], ...]
    output_positions: Indices
    stored: tuple[StoredBlock, ...]

    @property
    def count(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens)

    def sequences(self) -> Iterator[Indices]:
        """Yield the positions of every sequence of the trie, from its root to the end of a leaf."""
        chains: list[Indices] = []
        for node in self.nodes:
            positions = np.arange(node.start, node.end)
            chains.append(positions if node.parent < 0 else np.concatenate([chains[node.parent], positions]))
            if node.subtree_end == node.end:
                yield chains[-1]


def uncached_step(nodes: tuple[TrieNode, ...], tokens: Indices, output_positions: Indices = NO_INDICES) -> StepBatch:
    """Return a step over `tokens` that reads `output_positions`, without cached blocks."""
    depth, subtree_end = np.empty((2, len(tokens)), np.int64)
    for node in nodes:
        first = depth[nodes[node.parent].end - 1] + 1 if node.parent >= 0 else 0
        depth[node.start : node.end] = first + np.arange(node.end - node.start)
        subtree_end[node.start : node.end] = node.subtree_end
    return StepBatch(np.asarray(tokens, np.int64), depth, subtree_end, nodes, (), output_positions, ())
