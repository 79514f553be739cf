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

    parts: list[tuple[Part, ...]]
    cut_pieces: dict[tuple[int, int], int]
    flops: list[int]


def computed_parts(step: PieceTrie, spans: Iterable[NeededSpan], table: FlopsTable) -> ComputedParts:
    trie = step.trie
    parts: list[tuple[Part, ...]] = [()] * len(trie)
    cut_pieces: dict[tuple[int, int], int] = {}
    flops = [0] * len(step.pieces.first_pieces)
    # Many branches have the same lengths.
    costs: dict[Part, int] = {}
    # The least position that a span which came through the beginning of a node reached: all is computed from there on.
    reached: dict[int, int] = {}
    for piece, first, end in spans:
        node = step.nodes[piece]
        while trie.depths[node] >= end:
            node = trie.parents[node]
        request = step.pieces.requests[piece]
        while True:
            depth = trie.depths[node]
            parts[node], added = _with(parts[node], (max(first, depth), end))
            for part in added:
                if part not in costs:
                    costs[part] = table.flops(part[0], part[1] - part[0])
                flops[request] += costs[part]
            if first >= depth:
                if first:
                    cut_pieces.setdefault((node, first), piece)
                break
            if reached.get(node, end) <= first:
                break
            reached[node] = first
            end = depth
            node = trie.parents[node]
    return ComputedParts(parts, cut_pieces, flops)


def _with(parts: tuple[Part, ...], part: Part) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """`parts` with another one, and what of it was in none of them."""
    if not parts:
        return (part,), (part,)
    begin, end = part
    added, others, at = [], [], begin
    for other in parts:
        if other[1] < part[0] or other[0] > part[1]:
            others.append(other)
            continue
        if at < other[0]:
            added.append((at, other[0]))
        at = max(at, other[1])
        begin, end = min(begin, other[0]), max(end, other[1])
    if at < part[1]:
        added.append((at, part[1]))
    return tuple(sorted([*others, (begin, end)])), tuple(added)
