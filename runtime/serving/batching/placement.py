"""The positions of the tokens of each request in the stream of a step, and the sources of their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.computed_parts import ComputedParts
from moepass.runtime.serving.batching.needed_outputs import NeededOutputs
from moepass.runtime.serving.batching.request_pieces import PieceTrie, RequestPieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices
from moepass.runtime.serving.requests.answer import Usage
from moepass.runtime.serving.requests.request import Tokens


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenMap:
    """A map from tokens of pieces to positions in the stream, as runs of consecutive tokens.

    Attributes:
        run_starts: ascending index, among the tokens of all pieces, of the first token of each run.
        run_positions: position of that token in the stream, -1 for a run that is not in the stream.
    """

    run_starts: Indices
    run_positions: Indices

    def positions(self, tokens: Indices) -> Indices:
        """Return the positions in the stream of `tokens`, indices among the tokens of all pieces; -1 if absent."""
        runs = np.searchsorted(self.run_starts, tokens, side="right") - 1
        first = self.run_positions[runs]
        return np.where(first < 0, -1, first + tokens - self.run_starts[runs])

    def range_positions(self, ranges: Sequence[int]) -> tuple[Indices, Indices]:
        """Return the positions of the tokens of `ranges`, in the format of `NeededOutputs`, and the request of each."""
        starts, counts, requests = np.array(ranges, np.int64).reshape(-1, 3).T
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = self.positions(np.repeat(starts, counts) + offsets)
        # Position -1 would read the output of another request's token.
        assert not (positions < 0).any(), "a needed output is not computed"
        return positions, np.repeat(requests, counts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestPlacement:
    """The positions of one request's tokens in the stream of a step.

    An argument `piece` is the index of a piece in the request. Tokens that come from the cache, and tokens that no
    needed output depends on, are not in the stream.
    """

    usage: Usage
    _first_piece: int
    _pieces: RequestPieces
    _map: TokenMap

    def positions(self, piece: int) -> Indices:
        """Return, for each token of `piece`, its position in the stream of the step, or -1 if it is not there."""
        number = self._first_piece + piece
        return self._map.positions(np.arange(self._pieces.starts[number], self._pieces.end(number)))

    def vector_positions(self, piece: int) -> Indices:
        """Return the positions that the vector of `piece` is made of: its last token, or its sequence in order."""
        number = self._first_piece + piece
        if self._pieces.pieces[number].vector == "last":
            return self.positions(piece)[-1:]
        path = [self.positions(piece)]
        while (number := self._pieces.parents[number]) >= 0:
            path.append(self.positions(number - self._first_piece))
        return np.concatenate(path[::-1])


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScorePlaces:
    """The sources of the scores of all tokens of all scored pieces of a step, one piece after the other.

    Attributes:
        pieces: request and piece of each scored piece.
        starts: [pieces + 1] index of the first token of each piece in the arrays below.
        predicted_at: [t] position in the stream of the token before each token, whose output predicts it. -1 for a
            cached score, and for the first token of a sequence, which has no score.
        score_slots: [t] cache slot with the score, -1 if it is not cached.
        positions: [t] position of the token itself in the stream, -1 if it is not computed.
        cache_slots: [t] cache slot of the token, with or without a stored score; -1 for none. Tokens that the step
            computes again also have a slot.
    """

    pieces: tuple[tuple[int, int], ...]
    starts: Indices
    tokens: Tokens
    predicted_at: Indices
    score_slots: Indices
    positions: Indices
    cache_slots: Indices


def score_places(chains: CachedChains, needed: NeededOutputs, token_positions: TokenMap) -> ScorePlaces:
    """Return the sources of the scores of all scored pieces."""
    table = chains.pieces
    scored = [number for number, piece in enumerate(table.pieces) if piece.is_scored]
    counts = np.array([len(table.pieces[number].tokens) for number in scored], np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    flat = np.array([table.starts[number] for number in scored], np.int64) - starts[:-1]
    tokens = np.repeat(flat, counts) + np.arange(starts[-1])
    before = tokens - 1
    parents = np.array([table.parents[number] for number in scored], np.int64)
    ends = np.array([table.end(parent) if parent >= 0 else 0 for parent in parents.tolist()], np.int64)
    before[starts[:-1]] = ends - 1
    predicted_at = np.where(before >= 0, token_positions.positions(before), -1)
    score_slots, cache_slots = np.full((2, len(tokens)), -1, np.int64)
    for start, number in zip(starts.tolist(), scored, strict=False):
        if chains.held[number]:
            slots, _ = chains.slots(number)
            cache_slots[start : start + len(slots)] = slots
        if number in needed.score_slots:
            score_slots[start : start + len(needed.score_slots[number])] = needed.score_slots[number]
    predicted_at[score_slots >= 0] = -1
    requests = [table.requests[number] for number in scored]
    return ScorePlaces(
        pieces=tuple(
            (request, number - table.first_pieces[request]) for request, number in zip(requests, scored, strict=True)
        ),
        starts=starts,
        tokens=table.tokens[tokens],
        predicted_at=predicted_at,
        score_slots=score_slots,
        positions=token_positions.positions(tokens),
        cache_slots=cache_slots,
    )


def token_map(
    step: PieceTrie, computed: ComputedParts, part_starts: Sequence[tuple[int, ...]]
) -> tuple[TokenMap, Indices]:
    """Return the map of all tokens, and the distinct pairs [visits, 2] of a request and a node with its tokens."""
    table, trie = step.pieces, step.trie
    starts: list[int] = []
    positions: list[int] = []
    visits: list[int] = []
    nodes = len(trie)
    for piece in range(len(table.pieces)):
        base = table.starts[piece] - table.depths[piece]
        own_nodes: list[int] = []  # last tokens first
        node = step.nodes[piece]
        while trie.ends[node] > table.depths[piece]:
            own_nodes.append(node)
            node = trie.parents[node]
        for node in reversed(own_nodes):
            visits.append(table.requests[piece] * nodes + node)
            depth = trie.depths[node]
            for (begin, end), position in zip(computed.parts[node], part_starts[node], strict=True):
                if depth < begin:
                    starts.append(base + depth)
                    positions.append(-1)
                starts.append(base + begin)
                positions.append(position)
                depth = end
            if depth < trie.ends[node]:
                starts.append(base + depth)
                positions.append(-1)
    pairs = np.divmod(distinct(np.array(visits, np.int64)), max(nodes, 1))
    return TokenMap(np.array(starts, np.int64), np.array(positions, np.int64)), np.stack(pairs, axis=1)


def distinct(values: Indices) -> Indices:
    """Return the distinct `values` in ascending order."""
    # Sorting is ten times faster than `np.unique`, which hashes, for millions of integers.
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


def token_counts(
    step: PieceTrie, chains: CachedChains, computed: ComputedParts, visits: Indices
) -> tuple[Indices, Indices]:
    """Return two counts for each request: its distinct tokens, and the cached ones among them; both [requests]."""
    trie, requests = step.trie, len(step.pieces.first_pieces)
    lengths = np.array(trie.ends, np.int64) - np.array(trie.depths, np.int64)
    cached = np.zeros_like(lengths)
    if any(chains.held):
        # For each node, the position up to which the cache holds its tokens for some piece.
        held_ends = [0] * len(trie)
        for node, held in zip(step.nodes, chains.held, strict=True):
            held_ends[node] = max(held_ends[node], held * BLOCK_TOKENS)
        for node in sorted(range(len(trie)), key=trie.ends.__getitem__, reverse=True):
            end = min(held_ends[node], trie.ends[node])
            if trie.parents[node] >= 0:
                held_ends[trie.parents[node]] = max(held_ends[trie.parents[node]], held_ends[node])
            if end > trie.depths[node]:
                computed_again = sum(max(min(stop, end) - begin, 0) for begin, stop in computed.parts[node])
                cached[node] = end - trie.depths[node] - computed_again
    counts = np.zeros((2, requests), np.int64)
    np.add.at(counts[0], visits[:, 0], lengths[visits[:, 1]])
    np.add.at(counts[1], visits[:, 0], cached[visits[:, 1]])
    return counts[0], counts[1]
