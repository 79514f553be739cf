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

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices

# Tokens [first, end) of the sequence that ends with a piece are computed: (piece, first, end). `first` is a border
# between blocks.
NeededSpan = tuple[int, int, int]


@dataclasses.dataclass(eq=False, slots=True)
class NeededOutputs:
    """Ranges of outputs are three numbers each, in one flat list: the first token, an index among the tokens of all
    pieces; how many follow each other; and the request that reads them. Requests are in order.

    spans           what is computed
    logits          outputs that logits are read of
    vectors         outputs that are read as vectors
    output_count    tokens with a needed output, each once in the sequence of each piece
    logit_count     the same of those that logits are read of
    score_slots     of pieces with cached scores: for each token the slot (block * BLOCK_TOKENS + place) beside which
                    its score lies, -1 where the step computes it
    """

    spans: list[NeededSpan] = dataclasses.field(default_factory=list)
    logits: list[int] = dataclasses.field(default_factory=list)
    vectors: list[int] = dataclasses.field(default_factory=list)
    output_count: int = 0
    logit_count: int = 0
    score_slots: dict[int, Indices] = dataclasses.field(default_factory=dict)


def needed_outputs(chains: CachedChains) -> NeededOutputs:
    needed = NeededOutputs()
    table = chains.pieces
    for number, piece in enumerate(table.pieces):
        request = table.requests[number]
        start, depth, count = table.starts[number], table.depths[number], len(piece.tokens)
        # Runs [first, end) of tokens of the sequence whose outputs are needed.
        runs: list[tuple[int, int]] = []
        for read in piece.reads:
            runs.append((depth + read.place, depth + read.place + 1))
            needed.logits += (start + read.place, 1, request)
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
    """How many tokens are in `runs`, each counted once."""
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
    # Of spans that begin at the same border the longest has the others in it.
    ends: dict[int, int] = {}
    for first, end in runs:
        border = BLOCK_TOKENS * min(held, first // BLOCK_TOKENS)
        ends[border] = max(ends.get(border, 0), end)
    return [(piece, first, end) for first, end in ends.items()]


def _unknown_scores(chains: CachedChains, needed: NeededOutputs, number: int) -> list[tuple[int, int]]:
    """Runs [first, end) of tokens of a scored piece whose scores the step computes; notes where the others lie."""
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
