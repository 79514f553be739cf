"""The split of a step's trie into parts of attention, each one call of a kernel.

Contract
    in    the nodes of a step, the depths of its tokens, and the past that a token sees in a layer
    out   own parts: ranges of tokens among themselves, which cover every token once
          earlier parts: ranges of tokens over a node before them, or over a chain of cached blocks
          every visible pair of a query and a key is in exactly one part; `partial_attention` merges them

Pseudo-code
    for a layer with a window or chunks: cut long nodes, so that tokens skip pieces that they do not see
    for each subtree, from the leaves up, take the cheaper of
        one own part with a mask, which computes all pairs of its tokens; if the mask is too large, several parts, each
            for a range of the tokens over the subtree up to the end of the range
        its first node as a causal own part, its other tokens over that node as an earlier part, then its subtrees
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moepass.runtime.serving.batching.step_batch import Indices, TrieNode

# [Empirical] FLOPs that take as long as the overhead of one more part: its kernel launch, and merging its result. One
# thread with AVX-512, 8 heads of 64 numbers, fp32; half and twice as much change the time by less than 5 %.
CALL_FLOPS = 2_000_000

# [Empirical] Least tokens of a piece of a node, in layers whose window or chunk is smaller.
LEAST_PIECE = 64

# [Empirical] Cost of merging each query of an earlier part, in pairs of a query and a key. One CPU thread, 8 heads of
# 64 numbers, fp32: 512 parts of one key took 0.5 s for 760,000 queries, and a pair of a long part 32 ns.
MERGE_PAIRS = 20

# Limit of the numbers in the mask of one part (16 MiB). Larger subtrees and longer ranges of queries are split.
MASK_NUMBERS = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class VisiblePast:
    """The earlier tokens of its sequence that a token sees: those of the last `window` in its chunk of `chunk`.

    The token itself is included, and 0 means no limit.
    """

    window: int = 0
    chunk: int = 0

    def first_seen(self, depth: Indices) -> Indices:
        """Return the depth of the earliest token that a token at `depth` attends to."""
        first = np.zeros_like(depth)
        if self.window:
            first = np.maximum(first, depth - self.window + 1)
        if self.chunk:
            first = np.maximum(first, depth // self.chunk * self.chunk)
        return first


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPart:
    """Tokens [start, end) among themselves, with `before` further keys right before `start`.

    If `is_causal`, the tokens are one sequence. Otherwise trie and layer determine what each token sees.
    """

    start: int
    end: int
    is_causal: bool
    before: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EarlierPart:
    """Tokens [start, end) over keys [key_start, key_end) of a chain of cached blocks, or of the stream (`context` -1).

    If `sees_all`, each token sees every key. Otherwise the depths determine which keys it sees, possibly none.
    """

    start: int
    end: int
    key_start: int
    key_end: int
    context: int
    sees_all: bool


class TrieParts(NamedTuple):
    """The own and earlier parts of a step."""

    own: tuple[OwnPart, ...]
    earlier: tuple[EarlierPart, ...]


def trie_parts(
    nodes: Sequence[TrieNode],
    depth: Indices,
    context_tokens: Sequence[int],
    past: VisiblePast = VisiblePast(),
    pair_flops: int = 2048,
    *,
    parts_are_free: bool = False,
) -> TrieParts:
    """Return the parts of a step for layers in which tokens see `past`.

    `depth` [n] are the depths of its tokens, `context_tokens` the lengths of the chains of cached blocks, and
    `pair_flops` the FLOPs of one query with one key, in all heads. With `parts_are_free`, another part costs nothing
    but its pairs, because one call computes many parts.
    """
    splitter = _Splitter(depth, past, *(0, 0) if parts_are_free else (CALL_FLOPS // pair_flops, MERGE_PAIRS))
    pieces = list(splitter.pieces(nodes))
    is_whole = splitter.cheapest(pieces)
    added = 0  # end of the last subtree that is a single part
    for piece, is_single in zip(pieces, is_whole, strict=True):
        if piece.start < added:
            continue
        if is_single:
            splitter.add_subtree(piece)
            added = piece.subtree_end
        else:
            splitter.add_sequence(piece)
            splitter.add_earlier(piece.end, piece.subtree_end, piece.start, piece.end, int(depth[piece.start]))
    # Adjacent roots with the same context share one part over it.
    runs: list[list[int]] = []
    for root in (node for node in nodes if node.parent < 0 and node.context >= 0):
        if runs and runs[-1][::2] == [root.context, root.start]:
            runs[-1][2] = root.subtree_end
        else:
            runs.append([root.context, root.start, root.subtree_end])
    for context, start, end in runs:
        splitter.add_earlier(start, end, 0, context_tokens[context], 0, context)
    return TrieParts(tuple(splitter.own), tuple(splitter.earlier))


class _Splitter:
    def __init__(self, depth: Indices, past: VisiblePast, call_pairs: int, merge_pairs: int) -> None:
        self.depth, self.past, self.call_pairs, self.merge_pairs = depth, past, call_pairs, merge_pairs
        self.first_seen = past.first_seen(depth)
        self.own: list[OwnPart] = []
        self.earlier: list[EarlierPart] = []

    def pieces(self, nodes: Sequence[TrieNode]) -> Iterator[TrieNode]:
        limit = min((limit for limit in (self.past.window, self.past.chunk) if limit), default=0)
        # Nodes are cut at multiples of this depth; 0 for no cut.
        length = limit * max(1, LEAST_PIECE // limit) if limit and self.call_pairs else limit
        for node in nodes:
            start = node.start
            while length and start < node.end:
                stop = min(node.end, start + length - int(self.depth[start]) % length)
                yield dataclasses.replace(node, start=start, end=stop)
                start = stop
            if not length:
                yield node

    def cheapest(self, pieces: Sequence[TrieNode]) -> list[bool]:
        """Return for each subtree whether a single part costs at most as much as several."""
        # Pieces are in depth-first order, so the parent is the last piece whose subtree is still open.
        parents: list[int] = []
        is_open: list[int] = []
        for number, piece in enumerate(pieces):
            while is_open and pieces[is_open[-1]].subtree_end <= piece.start:
                is_open.pop()
            parents.append(is_open[-1] if is_open else -1)
            is_open.append(number)
        is_whole = [False] * len(pieces)
        below = [0] * len(pieces)
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            tokens, descendants = piece.end - piece.start, piece.subtree_end - piece.end
            cost = self.call_pairs + tokens * (tokens + 1) // 2
            is_whole[number] = not descendants
            if descendants:
                split_cost = cost + self.call_pairs + (tokens + self.merge_pairs) * descendants + below[number]
                rows = _masked_rows(tokens + descendants)
                count, remaining = divmod(tokens + descendants, rows)
                parts = count + (remaining > 0)
                pairs = rows * rows * count * (count + 1) // 2 + remaining * (tokens + descendants)
                unsplit_cost = parts * self.call_pairs + pairs
                # With a limited past, `split_cost` counts pairs that are never computed.
                is_whole[number] = unsplit_cost <= split_cost and (parts == 1 or self.past == VisiblePast())
                cost = unsplit_cost if is_whole[number] else split_cost
            if parents[number] >= 0:
                below[parents[number]] += cost
        return is_whole

    def add_sequence(self, piece: TrieNode) -> None:
        sees_all = self.first_seen[piece.end - 1] <= self.depth[piece.start]
        self.own.append(OwnPart(piece.start, piece.end, bool(sees_all)))

    def add_subtree(self, piece: TrieNode) -> None:
        if piece.end == piece.subtree_end:
            self.add_sequence(piece)
        else:
            rows = _masked_rows(piece.subtree_end - piece.start)
            for start in range(piece.start, piece.subtree_end, rows):
                end = min(start + rows, piece.subtree_end)
                self.own.append(OwnPart(start, end, False, start - piece.start))

    def add_earlier(
        self, start: int, end: int, key_start: int, key_end: int, key_depth: int, context: int = -1
    ) -> None:
        """Add tokens [start, end) over keys at depths from `key_depth` on, without the tokens that see none of them."""
        keys = key_end - key_start
        if self.past == VisiblePast():
            self.earlier.append(EarlierPart(start, end, key_start, key_end, context, True))
            return
        seeing = np.flatnonzero(self.first_seen[start:end] < key_depth + keys) + start
        if not len(seeing):
            return
        # A small gap costs less than one more part.
        cuts = np.flatnonzero(np.diff(seeing) * keys > self.call_pairs) + 1
        for run in np.split(seeing, cuts):
            first, stop = int(run[0]), int(run[-1]) + 1
            seen = self.first_seen[first:stop]
            needs_mask = seen.max() > max(key_depth, int(seen.min()))
            rows = max(1, MASK_NUMBERS // keys) if needs_mask else stop - first
            while first < stop:
                last = min(stop, first + rows)
                seen = self.first_seen[first:last]
                hidden = max(0, min(int(seen.min()) - key_depth, keys - 1))
                sees_all = bool(seen.max() <= key_depth + hidden)
                self.earlier.append(EarlierPart(first, last, key_start + hidden, key_end, context, sees_all))
                first = last


def _masked_rows(tokens: int) -> int:
    """Return the tokens of each part of a masked subtree of `tokens` tokens."""
    return min(tokens, max(1, MASK_NUMBERS // tokens))
