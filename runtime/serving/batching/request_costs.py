"""What requests take if nothing were shared and nothing cached."""

from __future__ import annotations

from collections.abc import Sequence

from moepass.runtime.serving.batching.cached_chains import cached_chains
from moepass.runtime.serving.batching.needed_outputs import needed_outputs
from moepass.runtime.serving.batching.piece_trie import build_trie
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.requests.request import Request


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
    trie = build_trie(requests)
    needed = needed_outputs(trie, cached_chains(trie, [None] * len(requests)))
    # Of each piece, where the tokens end in its sequence that its own outputs need.
    ends = [0] * len(trie.pieces)
    for piece, _, end in needed.spans:
        ends[piece] = max(ends[piece], end)
    is_inside = [False] * len(trie.pieces)
    flops = table.logit_flops * needed.logit_count + table.read_flops * needed.output_count
    for piece in reversed(range(len(trie.pieces))):
        if ends[piece] and not is_inside[piece]:
            flops += table.total(ends[piece])
        parent = trie.piece_parents[piece]
        if parent >= 0 and (ends[piece] or is_inside[piece]):
            is_inside[parent] = True
    return flops
