"""Which tokens of a trie a step computes, each once, and for which request.

A span of needed tokens runs up the trie from where it ends. What spans before it have covered already is theirs, so
every token counts for the first request that needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moepass.runtime.serving.batching.needed_outputs import NeededSpan
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.step_flops import FlopsTable

# Positions [first, end) in their sequences of tokens of one node.
Part = tuple[int, int]


@dataclasses.dataclass(eq=False, slots=True)
class ComputedParts:
    """
    parts       [nodes] what is computed of each node, ascending, neither overlapping nor adjoining
    cut_pieces  for a node and a position in it where a span begins: a piece whose cached blocks lie before it
    flops       [requests] of the tokens that were first needed for each request
    """

    parts: list[list[Part]]
    cut_pieces: dict[tuple[int, int], int]
    flops: list[int]


def computed_parts(trie: PieceTrie, spans: Iterable[NeededSpan], table: FlopsTable, requests: int) -> ComputedParts:
    computed = ComputedParts([[] for _ in trie.starts], {}, [0] * requests)
    # The least position that a span which came through the beginning of a node reached: all is computed from there on.
    reached: list[int | None] = [None] * len(trie.starts)
    for piece, first, end in spans:
        node = trie.piece_nodes[piece]
        while trie.depths[node] >= end:
            node = trie.parents[node]
        request = trie.piece_requests[piece]
        while True:
            begin = max(first, trie.depths[node])
            for new_begin, new_end in _add(computed.parts[node], begin, end):
                computed.flops[request] += table.flops(new_begin, new_end - new_begin)
            if first >= trie.depths[node]:
                computed.cut_pieces.setdefault((node, first), piece)
                break
            earlier = reached[node]
            if earlier is not None and earlier <= first:
                break
            reached[node] = first
            end = trie.depths[node]
            node = trie.parents[node]
    return computed


def _add(parts: list[Part], begin: int, end: int) -> list[Part]:
    """Add [begin, end) to `parts`; returns what is new of it."""
    if not parts:
        parts.append((begin, end))
        return [(begin, end)]
    new, kept, at = [], [], begin
    merged_begin, merged_end = begin, end
    for part in parts:
        if part[1] < begin or part[0] > end:
            kept.append(part)
            continue
        if at < part[0]:
            new.append((at, part[0]))
        at = max(at, part[1])
        merged_begin, merged_end = min(merged_begin, part[0]), max(merged_end, part[1])
    if at < end:
        new.append((at, end))
    kept.append((merged_begin, merged_end))
    parts[:] = sorted(kept)
    return new
