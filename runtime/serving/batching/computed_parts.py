"""The tokens of a trie that a step computes, each once, and the request that each counts for.

Each span of needed tokens is walked up the trie from its end. Tokens that an earlier span covers are skipped, so every
token counts for the first request that needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moepass.runtime.serving.batching.needed_outputs import NeededSpan
from moepass.runtime.serving.batching.request_pieces import PieceTrie
from moepass.runtime.serving.batching.step_flops import FlopsTable

# Positions [begin, end) in their sequences of tokens of one node.
Part = tuple[int, int]


@dataclasses.dataclass(eq=False, slots=True)
class ComputedParts:
    """The computed tokens of a trie.

    Attributes:
        parts: [nodes] ascending ranges of computed positions of each node, neither overlapping nor adjacent.
        cut_pieces: for a node and a position in it at which a span begins, a piece whose cached blocks end there.
        flops: [requests] FLOPs of the tokens that count for each request.
    """

    parts: list[tuple[Part, ...]]
    cut_pieces: dict[tuple[int, int], int]
    flops: list[int]


def computed_parts(step: PieceTrie, spans: Iterable[NeededSpan], table: FlopsTable) -> ComputedParts:
    """Return the union of `spans` in the trie of a step."""
    trie = step.trie
    parts: list[tuple[Part, ...]] = [()] * len(trie)
    cut_pieces: dict[tuple[int, int], int] = {}
    flops = [0] * len(step.pieces.first_pieces)
    # Many branches have the same length, so their FLOPs are looked up once.
    costs: dict[Part, int] = {}
    # By node, the smallest position that an earlier span reached above the node. Everything from there on is computed.
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
    """Return the union of `parts` and `part`, and the ranges of `part` that were in none of `parts`."""
    if not parts:
        return (part,), (part,)
    begin, end = part
    added, separate, covered = [], [], begin
    for existing in parts:
        if existing[1] < part[0] or existing[0] > part[1]:
            separate.append(existing)
            continue
        if covered < existing[0]:
            added.append((covered, existing[0]))
        covered = max(covered, existing[1])
        begin, end = min(begin, existing[0]), max(end, existing[1])
    if covered < part[1]:
        added.append((covered, part[1]))
    return tuple(sorted([*separate, (begin, end)])), tuple(added)
