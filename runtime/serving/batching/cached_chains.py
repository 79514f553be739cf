"""The cached blocks that the sequences of a trie begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks
from moepass.runtime.serving.batching.request_pieces import RequestPieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CachedChains:
    """What the cache holds, of the pieces of all requests.

    starts          [pieces + 1] where the blocks that end in each piece begin in `blocks`; none of a request that was
                    not looked up
    blocks          the cache block of each, -1 for none
    scores_known    [blocks, BLOCK_TOKENS] as in `MatchedBlocks`
    held            [pieces] leading blocks of each piece's sequence that the cache holds
    """

    pieces: RequestPieces
    starts: list[int]
    blocks: Indices
    scores_known: npt.NDArray[np.bool_]
    held: list[int]

    def last(self, piece: int, count: int) -> int:
        """The last of the first `count` blocks of the sequence that ends with `piece`; it tells what the others are."""
        while self.pieces.depths[piece] // BLOCK_TOKENS >= count:
            piece = self.pieces.parents[piece]
        return int(self.blocks[self.starts[piece] + count - 1 - self.pieces.depths[piece] // BLOCK_TOKENS])

    def first_blocks(self, piece: int, count: int) -> tuple[int, ...]:
        """The first `count` blocks of the sequence that ends with `piece`, first tokens first."""
        found: list[Indices] = []
        while piece >= 0:
            found.append(self.blocks[self.starts[piece] : self.starts[piece + 1]])
            piece = self.pieces.parents[piece]
        return tuple(np.concatenate(found[::-1])[:count].tolist())

    def held_tokens(self, piece: int) -> int:
        """Leading tokens of `piece` that the cache holds, in blocks that end in the piece."""
        held = self.held[piece] * BLOCK_TOKENS - self.pieces.depths[piece]
        return min(max(held, 0), len(self.pieces.pieces[piece].tokens))

    def slots(self, piece: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """[held tokens] slots of `piece`, block * BLOCK_TOKENS + place, and whether scores lie beside them."""
        depth = self.pieces.depths[piece]
        blocks, places = np.divmod(np.arange(depth, depth + self.held_tokens(piece)), BLOCK_TOKENS)
        blocks += self.starts[piece] - depth // BLOCK_TOKENS
        return self.blocks[blocks] * BLOCK_TOKENS + places, self.scores_known[blocks, places]


def cached_chains(table: RequestPieces, matched: Sequence[MatchedBlocks | None]) -> CachedChains:
    """`matched` has an entry per request of `table`. Raises InputError for hashes of a request of other pieces."""
    borders = [*table.first_pieces, len(table.pieces)]
    starts = [0]
    for request, one in enumerate(matched):
        pieces = range(borders[request], borders[request + 1])
        counts = [0] * len(pieces) if one is None else [_blocks_ending_in(table, piece) for piece in pieces]
        if one is not None and np.diff(one.hashes.starts).tolist() != counts:
            raise InputError(
                f"hashes of request {request} are of other pieces: {np.diff(one.hashes.starts).tolist()[:16]} end in "
                f"its pieces instead of {counts[:16]}",
                name="hashes",
                value=np.diff(one.hashes.starts).tolist(),
                expected=counts,
            )
        for count in counts:
            starts.append(starts[-1] + count)
    looked_up = [one for one in matched if one is not None]
    blocks = np.concatenate([NO_INDICES, *(one.blocks for one in looked_up)])
    known = np.concatenate([np.empty((0, BLOCK_TOKENS), bool), *(one.scores_known for one in looked_up)])
    return CachedChains(table, starts, blocks, known, _held(table, starts, blocks))


def _blocks_ending_in(table: RequestPieces, piece: int) -> int:
    depth = table.depths[piece]
    return (depth + len(table.pieces[piece].tokens)) // BLOCK_TOKENS - depth // BLOCK_TOKENS


def _held(table: RequestPieces, starts: Sequence[int], blocks: Indices) -> list[int]:
    if not (blocks >= 0).any():
        return [0] * len(table.pieces)
    # Of each block, how many from it on are held in a row, within the piece or beyond.
    missing = np.flatnonzero(np.concatenate((blocks < 0, [True])))
    runs = (missing[np.searchsorted(missing, np.arange(len(blocks) + 1))] - np.arange(len(blocks) + 1)).tolist()
    held: list[int] = []
    for piece, parent in enumerate(table.parents):
        before = held[parent] if parent >= 0 else 0
        is_unbroken = before == table.depths[piece] // BLOCK_TOKENS
        held.append(before + (min(runs[starts[piece]], starts[piece + 1] - starts[piece]) if is_unbroken else 0))
    return held
