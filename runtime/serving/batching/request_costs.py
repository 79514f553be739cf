"""What requests take without a cache: needed tokens piece by piece, and FLOPs if nothing were shared."""

from __future__ import annotations

from collections.abc import Sequence

from moepass.runtime.serving.batching.cached_chains import cached_chains
from moepass.runtime.serving.batching.needed_outputs import NeededOutputs, needed_outputs
from moepass.runtime.serving.batching.piece_trie import PieceTrie, build_trie
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.requests.request import Request


def needed_tokens(request: Request) -> list[int]:
    """[pieces] how many tokens of each piece, from its first, a step computes where the cache holds nothing.

    Fewer than it has where the others are not needed for what is read: of a scored label, all but the last.
    """
    trie, _, ends = _needed_ends([request])
    for piece in reversed(range(len(trie.pieces))):
        parent = trie.piece_parents[piece]
        if parent >= 0:
            ends[parent] = max(ends[parent], min(ends[piece], trie.piece_depths[piece]))
    return [max(end - depth, 0) for end, depth in zip(ends, trie.piece_depths, strict=True)]


def sequence_lengths(request: Request) -> list[int]:
    """Tokens of each sequence of `request`: from its first piece to one that none follows."""
    ends: list[int] = []
    for piece in request.pieces:
        ends.append((ends[piece.parent] if piece.parent >= 0 else 0) + len(piece.tokens))
    inner = {piece.parent for piece in request.pieces}
    return [end for number, end in enumerate(ends) if number not in inner]


def unshared_flops(requests: Sequence[Request], table: FlopsTable) -> int:
    """FLOPs of `requests` without sharing and without a cache, as servers without a trie compute them.

    Every piece with a needed output, and none in the pieces behind it, is a sequence of its own, from its first token
    to the last needed one. Outputs are read once per piece.
    """
    trie, needed, ends = _needed_ends(requests)
    is_inside = [False] * len(trie.pieces)
    flops = table.logit_flops * sum(needed.logits[1::3])
    for piece in reversed(range(len(trie.pieces))):
        if ends[piece] and not is_inside[piece]:
            flops += table.total(ends[piece])
        parent = trie.piece_parents[piece]
        if parent >= 0 and (ends[piece] or is_inside[piece]):
            is_inside[parent] = True
    return flops


def _needed_ends(requests: Sequence[Request]) -> tuple[PieceTrie, NeededOutputs, list[int]]:
    """Also: of each piece, where the tokens end in its sequence that its own outputs need."""
    trie = build_trie(requests)
    needed = needed_outputs(trie, cached_chains(trie, [None] * len(requests)))
    ends = [0] * len(trie.pieces)
    for piece, _, end in needed.spans:
        ends[piece] = max(ends[piece], end)
    return trie, needed, ends
