"""A step's trie as parts of attention: which queries meet which keys in one call of a kernel.

Contract
    in    the nodes of a step, the depths of its tokens, and what of its past a token sees in a layer
    out   own parts, which cover every token once: ranges of tokens among themselves
          earlier parts: ranges of tokens over a node before them, or over a chain of cached blocks
          every pair of a query and a key that it sees is in exactly one part; `partial_attention` merges them

Pseudo-code
    for a layer with a window or chunks: cut long nodes, so that tokens meet no piece that they see nothing of
    for each subtree, from the leaves up: the cheaper of
        one own part with a mask: all pairs of its tokens are computed; where the mask would be too large, several, one
            for each range of its tokens, over all tokens of the subtree up to its end
        its first node as a causal own part, all its other tokens over that node as an earlier part, then its subtrees
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from moepass.runtime.serving.batching.step_batch import Indices, TrieNode

# FLOPs that take as long as one more part does: its kernel's start and the merging of its result.
# [Empirical] one thread with AVX-512, 8 heads of 64 numbers, fp32; half and twice as much differ by less than 5 %.
CALL_FLOPS = 2_000_000

# Tokens of a piece of a node, in layers whose window or chunk is smaller. [Empirical]
LEAST_PIECE = 64

# What merging takes for each query of an earlier part, in pairs of a query and a key. [Empirical] on a CPU, one thread,
# 8 heads of 64 numbers, fp32: 512 parts of one key took 0.5 s for 760,000 queries, and a pair of a long part 32 ns.
MERGE_PAIRS = 20

# Numbers of the mask of one part, 16 MiB: larger subtrees and longer ranges of queries are split.
MASK_NUMBERS = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class VisiblePast:
    """What a token sees of its own sequence: its last `window` tokens with itself, or those of its chunk. 0: all."""

    window: int = 0
    chunk: int = 0

    def first_seen(self, depth: Indices) -> Indices:
        """The depth of the first token that tokens at `depth` see."""
        first = np.zeros_like(depth)
        if self.window:
            first = np.maximum(first, depth - self.window + 1)
        if self.chunk:
            first = np.maximum(first, depth // self.chunk * self.chunk)
        return first

    @property
    def piece_tokens(self) -> int:
        """Where nodes are cut: at multiples of this depth. 0: nowhere."""
        limit = min((limit for limit in (self.window, self.chunk) if limit), default=0)
        return limit * max(1, LEAST_PIECE // limit) if limit else 0


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPart:
    """Tokens [start, end) among themselves. `is_causal`: one sequence; else as trie and layer let each see.

    The keys begin `before` tokens earlier.
    """

    start: int
    end: int
    is_causal: bool
    before: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EarlierPart:
    """Tokens [start, end) over keys [key_start, key_end): of the stream, or of the chain `context` where that is >= 0.

    `sees_all`: each sees every one of them; else by depth, and some may see none.
    """

    start: int
    end: int
    key_start: int
    key_end: int
    context: int
    sees_all: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TrieParts:
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
    """The parts of a step for layers in which tokens see `past`.

    `context_tokens`: the length of each chain of cached blocks; `pair_flops`: FLOPs of one query with one key, in all
    heads. `parts_are_free`: one more part costs nothing but its pairs, because one call takes many.
    """
    splitter = _Splitter(depth, past, *(0, 0) if parts_are_free else (CALL_FLOPS // pair_flops, MERGE_PAIRS))
    pieces = list(splitter.pieces(nodes))
    is_whole = splitter.cheapest(pieces)
    number = 0
    while number < len(pieces):
        piece = pieces[number]
        number += 1
        if is_whole[number - 1]:
            splitter.add_subtree(piece)
            while number < len(pieces) and pieces[number].start < piece.subtree_end:
                number += 1
        else:
            splitter.add_sequence(piece)
            splitter.add_earlier(piece.end, piece.subtree_end, piece.start, piece.end, int(depth[piece.start]))
    # Neighbouring roots behind the same chain meet it together.
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
        length = self.past.piece_tokens
        for node in nodes:
            start = node.start
            while length and start < node.end:
                stop = min(node.end, start + length - int(self.depth[start]) % length)
                yield dataclasses.replace(node, start=start, end=stop)
                start = stop
            if not length:
                yield node

    def cheapest(self, pieces: Sequence[TrieNode]) -> list[bool]:
        """Of each subtree, whether one part is not dearer than several."""
        # Pieces end before what follows them begins, so a parent is the last one that is still open.
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
            tokens, others = piece.end - piece.start, piece.subtree_end - piece.end
            cost = self.call_pairs + _causal_pairs(tokens)
            is_whole[number] = not others
            if others:
                split = cost + self.call_pairs + (tokens + self.merge_pairs) * others + below[number]
                parts, pairs = _masked_parts(tokens + others)
                whole = parts * self.call_pairs + pairs
                # Of a layer that sees little, `split` counts pairs that are left out.
                is_whole[number] = whole <= split and (parts == 1 or self.past == VisiblePast())
                cost = whole if is_whole[number] else split
            if parents[number] >= 0:
                below[parents[number]] += cost
        return is_whole

    def add_sequence(self, piece: TrieNode) -> None:
        """The tokens of one piece among themselves; its descendants meet it elsewhere."""
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
        """Tokens [start, end) over keys at depths from `key_depth` on; those that see none are left out."""
        keys = key_end - key_start
        if self.past == VisiblePast():
            self.earlier.append(EarlierPart(start, end, key_start, key_end, context, True))
            return
        seeing = np.flatnonzero(self.first_seen[start:end] < key_depth + keys) + start
        if not len(seeing):
            return
        # A gap costs less than one more part if it is small.
        cuts = np.flatnonzero(np.diff(seeing) * keys > self.call_pairs) + 1
        for run in np.split(seeing, cuts):
            first, stop = int(run[0]), int(run[-1]) + 1
            while first < stop:
                last = min(stop, first + max(1, MASK_NUMBERS // keys))
                seen = self.first_seen[first:last]
                hidden = max(0, min(int(seen.min()) - key_depth, keys - 1))
                sees_all = bool(seen.max() <= key_depth + hidden)
                self.earlier.append(EarlierPart(first, last, key_start + hidden, key_end, context, sees_all))
                first = last


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _masked_rows(tokens: int) -> int:
    """Tokens of each part of a subtree that has so many and gets a mask."""
    return min(tokens, max(1, MASK_NUMBERS // tokens))


def _masked_parts(tokens: int) -> tuple[int, int]:
    """Of such a subtree, how many parts it becomes, and how many pairs they compute."""
    rows = _masked_rows(tokens)
    count, rest = divmod(tokens, rows)
    return count + (rest > 0), rows * rows * count * (count + 1) // 2 + rest * tokens
