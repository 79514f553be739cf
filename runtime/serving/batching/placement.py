"""Where the tokens of a request stand in a step: in its stream, or in the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks
from moepass.runtime.serving.batching.computed_parts import ComputedParts
from moepass.runtime.serving.batching.needed_outputs import NeededOutputs
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices
from moepass.runtime.serving.requests.answer import Usage


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenMap:
    """Places of all tokens of all pieces in the stream, as runs: they are many, and most follow each other."""

    run_starts: Indices
    run_positions: Indices

    def positions(self, tokens: Indices) -> Indices:
        """The places in the stream of `tokens`, indices among the tokens of all pieces; -1 for those not in it."""
        runs = np.searchsorted(self.run_starts, tokens, side="right") - 1
        first = self.run_positions[runs]
        return np.where(first < 0, -1, first + tokens - self.run_starts[runs])

    def range_positions(self, ranges: Sequence[int]) -> tuple[Indices, Indices]:
        """The places in the stream of the tokens of ranges as `NeededOutputs` has them, and the request of each."""
        starts, counts, requests = np.array(ranges, np.int64).reshape(-1, 3).T
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.positions(np.repeat(starts, counts) + offsets), np.repeat(requests, counts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestPlacement:
    """Where the tokens of one request stand. Pieces are numbered as in the request.

    A token stands in the stream, or in the cache, or nowhere: what no needed output depends on is not computed.
    """

    usage: Usage
    _request: int
    _trie: PieceTrie
    _needed: NeededOutputs
    _matched: MatchedBlocks | None
    _map: TokenMap

    def positions(self, piece: int) -> Indices:
        """[tokens of the piece] where each stands in the stream, -1 where it does not."""
        number = self._number(piece)
        start = self._trie.piece_starts[number]
        return self._map.positions(np.arange(start, start + len(self._trie.pieces[number].tokens)))

    def cache_slots(self, piece: int) -> Indices:
        """[tokens of the piece] the slot (block * BLOCK_TOKENS + place) that the cache has each in, -1 for none.

        Of a token that the step computes again the slot is given too. Of tokens whose block ends in another piece it
        is not: pieces that follow may have different blocks there.
        """
        number = self._number(piece)
        depth, count = self._trie.piece_depths[number], len(self._trie.pieces[number].tokens)
        slots = np.full(count, -1, np.int64)
        cached = min(self._needed.held[number] * BLOCK_TOKENS - depth, count)
        if cached > 0:
            assert self._matched is not None
            blocks, places = np.divmod(np.arange(depth, depth + cached), BLOCK_TOKENS)
            blocks += int(self._matched.hashes.starts[piece]) - depth // BLOCK_TOKENS
            slots[:cached] = self._matched.blocks[blocks] * BLOCK_TOKENS + places
        return slots

    def score_slots(self, piece: int) -> Indices:
        """[tokens of a scored piece] the slot beside which the score of each lies; -1: it comes from the step."""
        number = self._number(piece)
        found = self._needed.score_slots.get(number)
        return np.full(len(self._trie.pieces[number].tokens), -1, np.int64) if found is None else found

    def predicted_at(self, piece: int) -> Indices:
        """[tokens of a scored piece] where the token before each stands: the output there predicts it.

        -1 where the score lies in the cache, and for the first token of a sequence, which has none.
        """
        number = self._number(piece)
        start, parent = self._trie.piece_starts[number], self._trie.piece_parents[number]
        before = np.arange(start - 1, start - 1 + len(self._trie.pieces[number].tokens))
        if parent >= 0:
            before[0] = self._trie.piece_starts[parent] + len(self._trie.pieces[parent].tokens) - 1
            positions = self._map.positions(before)
        else:
            positions = np.concatenate(([-1], self._map.positions(before[1:])))
        return np.where(self.score_slots(piece) >= 0, -1, positions)

    def written_slots(self, piece: int, stored_slots: Indices) -> Indices:
        """[tokens of a scored piece] the slot beside which the score that the step computes belongs, -1 for none.

        `stored_slots` are those of `PackedStep.stored_slots`.
        """
        positions = self.positions(piece)
        slots = self.cache_slots(piece)
        in_stream = (slots < 0) & (positions >= 0)
        slots[in_stream] = stored_slots[positions[in_stream]]
        return np.where(self.predicted_at(piece) >= 0, slots, -1)

    def read_positions(self) -> Indices:
        """Where the tokens stand whose outputs are read, of all reads of all pieces, in order."""
        first = self._number(0)
        end = first + self._piece_count()
        tokens = [
            self._trie.piece_starts[number] + read.place
            for number in range(first, end)
            for read in self._trie.pieces[number].reads
        ]
        return self._map.positions(np.array(tokens, np.int64))

    def _number(self, piece: int) -> int:
        """The number of a piece of this request among all pieces."""
        return self._trie.request_pieces[self._request] + piece

    def _piece_count(self) -> int:
        firsts = self._trie.request_pieces
        end = firsts[self._request + 1] if self._request + 1 < len(firsts) else len(self._trie.pieces)
        return end - firsts[self._request]


def token_map(
    trie: PieceTrie, computed: ComputedParts, part_starts: Sequence[tuple[int, ...]]
) -> tuple[TokenMap, Indices]:
    """The map, and [visits, 2] each request with each node that its pieces pass, once."""
    starts: list[int] = []
    positions: list[int] = []
    visits: list[int] = []
    nodes = len(trie.starts)
    for piece in range(len(trie.pieces)):
        base = trie.piece_starts[piece] - trie.piece_depths[piece]
        for node in reversed(_own_nodes(trie, piece)):
            visits.append(trie.piece_requests[piece] * nodes + node)
            at = trie.depths[node]
            for (begin, end), position in zip(computed.parts[node], part_starts[node], strict=True):
                if at < begin:
                    starts.append(base + at)
                    positions.append(-1)
                starts.append(base + begin)
                positions.append(position)
                at = end
            if at < trie.ends[node]:
                starts.append(base + at)
                positions.append(-1)
    pairs = np.divmod(_distinct(np.array(visits, np.int64)), max(nodes, 1))
    return TokenMap(np.array(starts, np.int64), np.array(positions, np.int64)), np.stack(pairs, axis=1)


def _distinct(values: Indices) -> Indices:
    # By sorting: numpy's own `unique` hashes, and takes ten times as long for millions of integers.
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


def _own_nodes(trie: PieceTrie, piece: int) -> list[int]:
    """The nodes that the tokens of `piece` stand in, last tokens first."""
    depth = trie.piece_depths[piece]
    node = trie.piece_nodes[piece]
    found = []
    while trie.ends[node] > depth:
        found.append(node)
        node = trie.parents[node]
    return found


def token_counts(
    trie: PieceTrie, needed: NeededOutputs, computed: ComputedParts, visits: Indices, requests: int
) -> tuple[Indices, Indices]:
    """[requests] distinct tokens of each request, and how many of them come from the cache and not from the step."""
    lengths = np.array(trie.ends, np.int64) - np.array(trie.depths, np.int64)
    cached = np.zeros_like(lengths)
    if any(needed.held):
        # Up to which position the cache holds a node's tokens, for some piece that passes it.
        held_ends = [0] * len(trie.starts)
        for node, held in zip(trie.piece_nodes, needed.held, strict=True):
            held_ends[node] = max(held_ends[node], held * BLOCK_TOKENS)
        for node in sorted(range(len(trie.starts)), key=trie.ends.__getitem__, reverse=True):
            end = min(held_ends[node], trie.ends[node])
            if trie.parents[node] >= 0:
                held_ends[trie.parents[node]] = max(held_ends[trie.parents[node]], held_ends[node])
            if end > trie.depths[node]:
                again = sum(max(min(stop, end) - begin, 0) for begin, stop in computed.parts[node])
                cached[node] = end - trie.depths[node] - again
    found = np.zeros((2, requests), np.int64)
    np.add.at(found[0], visits[:, 0], lengths[visits[:, 1]])
    np.add.at(found[1], visits[:, 0], cached[visits[:, 1]])
    return found[0], found[1]
