"""A step as data: the trie of all its tokens in depth-first order, and the cached blocks that its branches hang on.

Token q sees token k exactly if `k <= q < subtree_end[k]`, and beside that the cached tokens of its branch. Its
position in its own sequence is `depth[q]`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
NO_INDICES: Indices = np.empty(0, np.int64)

# Tokens of a block of the cache. The method's source has as many (arXiv 2605.02960).
BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class TrieNode:
    """Tokens [start, end) of the stream, which follow each other without a branch.

    `parent` is the index of the node before it, -1 for a root. Descendants end at `subtree_end`. A root hangs on
    `context`, an index of `StepBatch.contexts`, or -1 where its sequence begins with it; its descendants have the
    same one.
    """

    start: int
    end: int
    parent: int
    subtree_end: int
    context: int = -1


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredBlock:
    """The keys and values of the tokens at `positions` [BLOCK_TOKENS] of the stream go to cache block `block`."""

    block: int
    positions: Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """One forward pass.

    tokens        [n] token ids, in depth-first order of the trie
    depth         [n] their positions in their sequences, cached tokens before them counted
    subtree_end   [n] for each the index behind its last descendant
    nodes         the trie without its single-child chains, in depth-first order
    contexts      for each chain of cached blocks that roots hang on: the blocks, first tokens first
    places        [m] positions of the stream whose output is read, ascending
    stored        blocks to fill from this step
    """

    tokens: Indices
    depth: Indices
    subtree_end: Indices
    nodes: tuple[TrieNode, ...]
    contexts: tuple[tuple[int, ...], ...]
    places: Indices
    stored: tuple[StoredBlock, ...]

    @property
    def count(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens)
