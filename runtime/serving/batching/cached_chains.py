"""The cached blocks that sequences begin with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.batching.block_hashes import MatchedBlocks
from moepass.runtime.serving.batching.request_pieces import RequestPieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CachedChains:
    """The cached blocks of the pieces of all requests.

    Attributes:
        starts: [pieces + 1] index into `blocks` of the first block that ends in each piece. A request without a cache
            lookup has no blocks.
        blocks: the cache block of each block of tokens, -1 if it is not cached.
        scores_known: [blocks, BLOCK_TOKENS] as in `MatchedBlocks`.
        held: [pieces] number of leading blocks of each piece's sequence that the cache holds.
    """

    pieces: RequestPieces
    starts: list[int]
    blocks: Indices
    scores_known: npt.NDArray[np.bool_]
    held: list[int]

    def last(self, piece: int, count: int) -> int:
        """Return the last of the first `count` blocks of the sequence that ends with `piece`; it implies the others."""
        while self.pieces.depths[piece] // BLOCK_TOKENS >= count:
            piece = self.pieces.parents[piece]
        return int(self.blocks[self.starts[piece] + count - 1 - self.pieces.depths[piece] // BLOCK_TOKENS])

    def first_blocks(self, piece: int, count: int) -> tuple[int, ...]:
        """Return the first `count` blocks of the sequence that ends with `piece`, in order."""
        blocks: list[Indices] = []
        while piece >= 0:
            blocks.append(self.blocks[self.starts[piece] : self.starts[piece + 1]])
            piece = self.pieces.parents[piece]
        return tuple(np.concatenate(blocks[::-1])[:count].tolist())

    def held_tokens(self, piece: int) -> int:
        """Return how many leading tokens of `piece` the cache holds, in blocks that end in the piece."""
        held = self.held[piece] * BLOCK_TOKENS - self.pieces.depths[piece]
        return min(max(held, 0), len(self.pieces.pieces[piece].tokens))

    def slots(self, piece: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Return the slots [held tokens] of `piece`, block * BLOCK_TOKENS + index, and whether they store scores."""
        depth = self.pieces.depths[piece]
        blocks, offsets = np.divmod(np.arange(depth, depth + self.held_tokens(piece)), BLOCK_TOKENS)
        blocks += self.starts[piece] - depth // BLOCK_TOKENS
        return self.blocks[blocks] * BLOCK_TOKENS + offsets, self.scores_known[blocks, offsets]


def cached_chains(table: RequestPieces, matched: Sequence[MatchedBlocks | None]) -> CachedChains:
    """Return the cached blocks of all pieces; `matched` has one entry per request."""
    first_pieces = [*table.first_pieces, len(table.pieces)]
    counts: list[int] = []
    for (first, end), match in zip(itertools.pairwise(first_pieces), matched, strict=True):
        counts += [0] * (end - first) if match is None else np.diff(match.hashes.starts).tolist()
        assert match is None or counts[first:] == [_blocks_ending_in(table, piece) for piece in range(first, end)]
    starts = [0, *itertools.accumulate(counts)]
    looked_up = [match for match in matched if match is not None]
    blocks = np.concatenate([NO_INDICES, *(match.blocks for match in looked_up)])
    scores_known = np.concatenate([np.empty((0, BLOCK_TOKENS), bool), *(match.scores_known for match in looked_up)])
    return CachedChains(table, starts, blocks, scores_known, _held(table, starts, blocks))


def _blocks_ending_in(table: RequestPieces, piece: int) -> int:
    depth = table.depths[piece]
    return (depth + len(table.pieces[piece].tokens)) // BLOCK_TOKENS - depth // BLOCK_TOKENS


def _held(table: RequestPieces, starts: Sequence[int], blocks: Indices) -> list[int]:
    if not (blocks >= 0).any():
        return [0] * len(table.pieces)
    # For each block, how many consecutive blocks from it on are cached, also beyond the end of its piece.
    missing = np.flatnonzero(np.concatenate((blocks < 0, [True])))
    runs = (missing[np.searchsorted(missing, np.arange(len(blocks) + 1))] - np.arange(len(blocks) + 1)).tolist()
    held: list[int] = []
    for piece, parent in enumerate(table.parents):
        before = held[parent] if parent >= 0 else 0
        is_unbroken = before == table.depths[piece] // BLOCK_TOKENS
        held.append(before + (min(runs[starts[piece]], starts[piece + 1] - starts[piece]) if is_unbroken else 0))
    return held
