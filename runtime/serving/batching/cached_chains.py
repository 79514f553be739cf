"""The cached blocks that a sequence begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CachedChains:
    """`matched` has an entry per request of `trie`."""

    trie: PieceTrie
    matched: Sequence[MatchedBlocks | None]

    def last(self, piece: int, count: int) -> int:
        """The last of the first `count` blocks of the sequence that ends with `piece`; it tells what the others are."""
        while self.trie.piece_depths[piece] // BLOCK_TOKENS >= count:
            piece = self.trie.piece_parents[piece]
        return int(self._own(piece)[count - 1 - self.trie.piece_depths[piece] // BLOCK_TOKENS])

    def first_blocks(self, piece: int, count: int) -> tuple[int, ...]:
        """The first `count` blocks of the sequence that ends with `piece`, first tokens first."""
        found: list[Indices] = []
        while piece >= 0:
            found.append(self._own(piece))
            piece = self.trie.piece_parents[piece]
        return tuple([block for own in reversed(found) for block in own.tolist()][:count])

    def _own(self, piece: int) -> Indices:
        """The blocks that end in `piece`."""
        request = self.trie.piece_requests[piece]
        matched = self.matched[request]
        assert matched is not None
        number = piece - self.trie.request_pieces[request]
        first, end = matched.hashes.starts[number : number + 2].tolist()
        return matched.blocks[first:end]
