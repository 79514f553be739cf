"""Which outputs of the model a request reads, and from where on each of its sequences has to be computed for that.

The output at a token is needed for
    a read                  at the token itself
    the score of a token    at the token before it, which may be the last one of the piece before
    the vector "last"       at the last token of the piece
    the vector "mean"       at every token of the sequence

A score that lies beside a cached block needs nothing, unless more than one most likely token is asked for. The first
token of a sequence has no score.

A token with a needed output is computed itself, and so is what precedes it back to the end of the cached blocks: those
that the cache holds in one piece from the beginning of the sequence, up to the last border between two blocks at or
before the token. So even a request whose blocks are all in the cache computes the last block up to the token that is
read, and a sequence whose mean is asked for takes nothing from the cache. What no needed output depends on, such as
the last token of a scored label, is not computed at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices

# Tokens [first, end) of the sequence that ends with a piece are computed: (piece, first, end). `first` is a border
# between blocks.
NeededSpan = tuple[int, int, int]


@dataclasses.dataclass(eq=False, slots=True)
class NeededOutputs:
    """Ranges of outputs are three numbers each, in one flat list: the first token, an index among the tokens of all
    pieces; how many follow each other; and the request that reads them. Requests are in order.

    held            [pieces] leading blocks of each piece's sequence that the cache holds
    spans           what is computed
    logits          outputs that logits are read of
    vectors         outputs that are read as vectors
    score_slots     of pieces with cached scores: for each token the slot (block * BLOCK_TOKENS + place) beside which
                    its score lies, -1 where the step computes it
    """

    held: list[int] = dataclasses.field(default_factory=list)
    spans: list[NeededSpan] = dataclasses.field(default_factory=list)
    logits: list[int] = dataclasses.field(default_factory=list)
    vectors: list[int] = dataclasses.field(default_factory=list)
    score_slots: dict[int, Indices] = dataclasses.field(default_factory=dict)


def needed_outputs(trie: PieceTrie, matched: Sequence[MatchedBlocks | None]) -> NeededOutputs:
    """Raises InputError where `matched` does not fit its request."""
    needed = NeededOutputs()
    for number, piece in enumerate(trie.pieces):
        request = trie.piece_requests[number]
        own_number = number - trie.request_pieces[request]
        cached = matched[request]
        held = 0 if cached is None else _held(trie, needed, number, own_number, cached)
        needed.held.append(held)
        start, depth, count = trie.piece_starts[number], trie.piece_depths[number], len(piece.tokens)
        # Runs [first, end) of tokens of the sequence whose outputs are needed.
        runs: list[tuple[int, int]] = []
        for read in piece.reads:
            runs.append((depth + read.place, depth + read.place + 1))
            needed.logits += (start + read.place, 1, request)
        if piece.is_scored:
            for first, end in _unknown_scores(trie, needed, number, own_number, cached):
                runs.append((depth + first - 1, depth + end - 1))
                if first == 0:
                    needed.logits += (_piece_end(trie, trie.piece_parents[number]) - 1, 1, request)
                    first = 1
                if first < end:
                    needed.logits += (start + first - 1, end - first, request)
        if piece.vector == "last":
            runs.append((depth + count - 1, depth + count))
            needed.vectors += (start + count - 1, 1, request)
        elif piece.vector == "mean":
            runs.append((0, depth + count))
            on_path = number
            while on_path >= 0:
                first = trie.piece_starts[on_path]
                needed.vectors += (first, _piece_end(trie, on_path) - first, request)
                on_path = trie.piece_parents[on_path]
        if runs:
            needed.spans += _spans(number, held, runs)
    return needed


def _spans(piece: int, held: int, runs: list[tuple[int, int]]) -> list[NeededSpan]:
    if not held:
        return [(piece, 0, max([end for _, end in runs]))]
    # Of spans that begin at the same border the longest has the others in it.
    ends: dict[int, int] = {}
    for first, end in runs:
        border = BLOCK_TOKENS * min(held, first // BLOCK_TOKENS)
        ends[border] = max(ends.get(border, 0), end)
    return [(piece, first, end) for first, end in ends.items()]


def _piece_end(trie: PieceTrie, piece: int) -> int:
    return trie.piece_starts[piece] + len(trie.pieces[piece].tokens)


def _held(trie: PieceTrie, needed: NeededOutputs, piece: int, own_number: int, cached: MatchedBlocks) -> int:
    """Leading blocks of the sequence that ends with `piece` that the cache holds."""
    depth = trie.piece_depths[piece]
    before = depth // BLOCK_TOKENS
    count = (depth + len(trie.pieces[piece].tokens)) // BLOCK_TOKENS - before
    first, end = cached.hashes.starts[own_number : own_number + 2].tolist()
    if end - first != count:
        raise InputError(
            f"piece {own_number} of a request has {end - first} hashes; {count} blocks end in it",
            name="hashes",
            value=end - first,
            expected=count,
        )
    parent = trie.piece_parents[piece]
    held = needed.held[parent] if parent >= 0 else 0
    if held < before or not count:
        return held
    missing = np.flatnonzero(cached.blocks[first:end] < 0)
    return held + (int(missing[0]) if len(missing) else count)


def _unknown_scores(
    trie: PieceTrie, needed: NeededOutputs, piece: int, own_number: int, cached: MatchedBlocks | None
) -> list[tuple[int, int]]:
    """Runs [first, end) of tokens of a scored piece whose scores the step computes; notes where the others lie."""
    depth = trie.piece_depths[piece]
    count = len(trie.pieces[piece].tokens)
    begin = 1 if depth == 0 else 0
    cached_count = min(needed.held[piece] * BLOCK_TOKENS - depth, count)
    if cached is None or cached_count <= begin or trie.pieces[piece].scored_top > 1:
        return [(begin, count)] if begin < count else []
    blocks, places = np.divmod(np.arange(depth, depth + cached_count), BLOCK_TOKENS)
    blocks += int(cached.hashes.starts[own_number]) - depth // BLOCK_TOKENS
    slots = np.full(count, -1, np.int64)
    slots[:cached_count] = np.where(
        cached.scores_known[blocks, places], cached.blocks[blocks] * BLOCK_TOKENS + places, -1
    )
    slots[:begin] = -1
    needed.score_slots[piece] = slots
    is_unknown = np.concatenate(([False], slots < 0, [False]))
    is_unknown[1 : 1 + begin] = False
    borders = np.flatnonzero(is_unknown[1:] != is_unknown[:-1]).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))
