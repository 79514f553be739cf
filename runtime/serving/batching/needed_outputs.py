"""The outputs of the model that a request reads, and the tokens that must be computed for them.

An output is needed at
    a read              the token itself
    a scored token      the token before it, which may be the last token of the parent piece
    the vector "last"   the last token of the piece
    the vector "mean"   every token of the sequence

A score stored with a cached block needs no output, unless more than one most likely token is requested. The first token
of a sequence has no score.

A token with a needed output is computed, together with the tokens before it back to the end of the cached blocks. Only
blocks that the cache holds without a gap from the beginning of the sequence count, and they end at a block boundary at
or before the token. So a request whose blocks are all cached still computes its last block up to the token that is
read, and a sequence with a mean vector uses nothing from the cache. Tokens that no needed output depends on, such as
the last token of a scored label, are not computed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices

# (piece, first, end): tokens [first, end) of the sequence that ends with the piece are computed. `first` is a block
# boundary.
NeededSpan = tuple[int, int, int]


@dataclasses.dataclass(eq=False, slots=True)
class NeededOutputs:
    """The outputs that all requests read.

    Ranges of outputs are flat lists with three numbers for each range: index of its first token among the tokens of all
    pieces, number of tokens, and the request that reads them. Requests are in order.

    Attributes:
        output_count: number of tokens with a needed output, counted once for each piece that reads them.
        score_slots: by piece with cached scores, the cache slot with the score of each token; -1 for scores that the
            step computes.
    """

    spans: list[NeededSpan] = dataclasses.field(default_factory=list)
    logits: list[int] = dataclasses.field(default_factory=list)
    vectors: list[int] = dataclasses.field(default_factory=list)
    output_count: int = 0
    logit_count: int = 0
    score_slots: dict[int, Indices] = dataclasses.field(default_factory=dict)


def needed_outputs(chains: CachedChains) -> NeededOutputs:
    """Return the needed outputs of the pieces in `chains`."""
    needed = NeededOutputs()
    table = chains.pieces
    for number, piece in enumerate(table.pieces):
        request = table.requests[number]
        start, depth, count = table.starts[number], table.depths[number], len(piece.tokens)
        # Ranges [first, end) of positions in the sequence whose outputs are needed.
        runs: list[tuple[int, int]] = []
        for read in piece.reads:
            runs.append((depth + read.index, depth + read.index + 1))
            needed.logits += (start + read.index, 1, request)
        if piece.is_scored:
            for first, end in _unknown_scores(chains, needed, number):
                runs.append((depth + first - 1, depth + end - 1))
                if first == 0:
                    needed.logits += (table.end(table.parents[number]) - 1, 1, request)
                    first = 1
                if first < end:
                    needed.logits += (start + first - 1, end - first, request)
        if runs:
            needed.logit_count += _distinct(runs)
        if piece.vector == "last":
            runs.append((depth + count - 1, depth + count))
            needed.vectors += (start + count - 1, 1, request)
        elif piece.vector == "mean":
            runs.append((0, depth + count))
            on_path = number
            while on_path >= 0:
                first = table.starts[on_path]
                needed.vectors += (first, table.end(on_path) - first, request)
                on_path = table.parents[on_path]
        if runs:
            needed.output_count += _distinct(runs)
            needed.spans += _spans(number, chains.held[number], runs)
    return needed


def _distinct(runs: list[tuple[int, int]]) -> int:
    """Return the number of distinct tokens in `runs`."""
    if len(runs) == 1:
        return runs[0][1] - runs[0][0]
    count = reached = 0
    for first, end in sorted(runs):
        count += max(0, end - max(first, reached))
        reached = max(reached, end)
    return count


def _spans(piece: int, held: int, runs: list[tuple[int, int]]) -> list[NeededSpan]:
    if not held:
        return [(piece, 0, max([end for _, end in runs]))]
    # The longest span that begins at a block boundary contains all others that begin there.
    ends: dict[int, int] = {}
    for first, end in runs:
        border = BLOCK_TOKENS * min(held, first // BLOCK_TOKENS)
        ends[border] = max(ends.get(border, 0), end)
    return [(piece, first, end) for first, end in ends.items()]


def _unknown_scores(chains: CachedChains, needed: NeededOutputs, number: int) -> list[tuple[int, int]]:
    """Return the runs [first, end) of scores that the step computes, and record slots of cached ones in `needed`."""
    piece = chains.pieces.pieces[number]
    count = len(piece.tokens)
    begin = 1 if chains.pieces.depths[number] == 0 else 0
    if not chains.held[number] or chains.held_tokens(number) <= begin or piece.scored_top > 1:
        return [(begin, count)] if begin < count else []
    held_slots, are_known = chains.slots(number)
    slots = np.full(count, -1, np.int64)
    slots[: len(held_slots)] = np.where(are_known, held_slots, -1)
    slots[:begin] = -1
    needed.score_slots[number] = slots
    is_unknown = np.concatenate(([False], slots < 0, [False]))
    is_unknown[1 : 1 + begin] = False
    borders = np.flatnonzero(is_unknown[1:] != is_unknown[:-1]).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))
