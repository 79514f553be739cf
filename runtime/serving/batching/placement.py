"""Where the tokens of a request stand in a step: in its stream, or in the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.cached_chains import CachedChains
from moepass.runtime.serving.batching.computed_parts import ComputedParts
from moepass.runtime.serving.batching.needed_outputs import NeededOutputs
from moepass.runtime.serving.batching.piece_trie import PieceTrie
from moepass.runtime.serving.batching.request_pieces import RequestPieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices
from moepass.runtime.serving.requests.answer import Usage
from moepass.runtime.serving.requests.request import Tokens


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
        found = self.positions(np.repeat(starts, counts) + offsets)
        # An index of -1 would read the output at another request's token.
        assert not (found < 0).any(), "a needed output is not computed"
        return found, np.repeat(requests, counts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestPlacement:
    """Where the tokens of one request stand. Pieces are numbered as in the request.

    A token stands in the stream, or in the cache, or nowhere: what no needed output depends on is not computed.
    """

    usage: Usage
    _first_piece: int
    _chains: CachedChains
    _map: TokenMap

    def positions(self, piece: int) -> Indices:
        """[tokens of the piece] where each stands in the stream, -1 where it does not."""
        number = self._first_piece + piece
        table = self._chains.pieces
        return self._map.positions(np.arange(table.starts[number], table.end(number)))

    def vector_positions(self, piece: int) -> Indices:
        """Where the tokens stand that the vector of `piece` is made of: its last one, or all of its sequence, in order.

        None of a piece without a vector.
        """
        table = self._chains.pieces
        number = self._first_piece + piece
        vector = table.pieces[number].vector
        if vector is None:
            return NO_INDICES
        if vector == "last":
            return self.positions(piece)[-1:]
        path = [self.positions(piece)]
        while (number := table.parents[number]) >= 0:
            path.append(self.positions(number - self._first_piece))
        return np.concatenate(path[::-1])

    def cache_slots(self, piece: int) -> Indices:
        """[tokens of the piece] the slot (block * BLOCK_TOKENS + place) that the cache has each in, -1 for none.

        Of a token that the step computes again the slot is given too. Of tokens whose block ends in another piece it
        is not: pieces that follow may have different blocks there.
        """
        number = self._first_piece + piece
        found = np.full(len(self._chains.pieces.pieces[number].tokens), -1, np.int64)
        slots, _ = self._chains.slots(number)
        found[: len(slots)] = slots
        return found


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScorePlaces:
    """Where the scores of all tokens of all scored pieces of a step come from, one piece after the other.

    pieces          request and piece, of each scored piece
    starts          [pieces + 1] where the tokens of each begin below
    tokens          [t] their ids
    predicted_at    [t] where the token before each stands in the stream: the output there predicts it. -1 where the
                    score lies in the cache, and for the first token of a sequence, which has none
    score_slots     [t] the slot (block * BLOCK_TOKENS + place) beside which the score of each lies; -1 for the others
    positions       [t] where each stands in the stream itself, -1 where it does not
    cache_slots     [t] the slot that the cache has each in, known or not; -1 for none
    """

    pieces: tuple[tuple[int, int], ...]
    starts: Indices
    tokens: Tokens
    predicted_at: Indices
    score_slots: Indices
    positions: Indices
    cache_slots: Indices

    def written_slots(self, stored_slots: Indices) -> Indices:
        """[t] the slot beside which a score that the step computes belongs, -1 for none.

        `stored_slots` are those of `PackedStep.stored_slots`.
        """
        stored = np.where(self.positions >= 0, np.append(stored_slots, -1)[self.positions], -1)
        slots = np.where(self.cache_slots >= 0, self.cache_slots, stored)
        return np.where(self.predicted_at >= 0, slots, -1)


def score_places(chains: CachedChains, needed: NeededOutputs, places: TokenMap) -> ScorePlaces:
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
    predicted_at = np.where(before >= 0, places.positions(before), -1)
    score_slots, cache_slots = np.full((2, len(tokens)), -1, np.int64)
    for at, number in zip(starts.tolist(), scored, strict=False):
        if chains.held[number]:
            slots, _ = chains.slots(number)
            cache_slots[at : at + len(slots)] = slots
        if number in needed.score_slots:
            score_slots[at : at + len(needed.score_slots[number])] = needed.score_slots[number]
    predicted_at[score_slots >= 0] = -1
    requests = [table.requests[number] for number in scored]
    return ScorePlaces(
        pieces=tuple((one, number - table.first_pieces[one]) for one, number in zip(requests, scored, strict=True)),
        starts=starts,
        tokens=table.tokens[tokens],
        predicted_at=predicted_at,
        score_slots=score_slots,
        positions=places.positions(tokens),
        cache_slots=cache_slots,
    )


def read_positions(table: RequestPieces, places: TokenMap) -> Indices:
    """Where the tokens stand that are read, of all reads of all pieces of all requests, in order."""
    tokens = [
        start + read.place for start, piece in zip(table.starts, table.pieces, strict=True) for read in piece.reads
    ]
    return places.positions(np.array(tokens, np.int64))


def token_map(
    step: PieceTrie, computed: ComputedParts, part_starts: Sequence[tuple[int, ...]]
) -> tuple[TokenMap, Indices]:
    """The map, and [visits, 2] each request with each node that its pieces pass, once."""
    table, trie = step.pieces, step.trie
    starts: list[int] = []
    positions: list[int] = []
    visits: list[int] = []
    nodes = len(trie)
    for piece in range(len(table.pieces)):
        base = table.starts[piece] - table.depths[piece]
        for node in reversed(_own_nodes(step, piece)):
            visits.append(table.requests[piece] * nodes + node)
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
    pairs = np.divmod(distinct(np.array(visits, np.int64)), max(nodes, 1))
    return TokenMap(np.array(starts, np.int64), np.array(positions, np.int64)), np.stack(pairs, axis=1)


def distinct(values: Indices) -> Indices:
    """`values`, each once, ascending."""
    # By sorting: numpy's own `unique` hashes, and takes ten times as long for millions of integers.
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


def _own_nodes(step: PieceTrie, piece: int) -> list[int]:
    """The nodes that the tokens of `piece` stand in, last tokens first."""
    trie = step.trie
    depth = step.pieces.depths[piece]
    node = step.nodes[piece]
    found = []
    while trie.ends[node] > depth:
        found.append(node)
        node = trie.parents[node]
    return found


def token_counts(
    step: PieceTrie, chains: CachedChains, computed: ComputedParts, visits: Indices
) -> tuple[Indices, Indices]:
    """[requests] distinct tokens of each request, and how many of them come from the cache and not from the step."""
    trie, requests = step.trie, len(step.pieces.first_pieces)
    lengths = np.array(trie.ends, np.int64) - np.array(trie.depths, np.int64)
    cached = np.zeros_like(lengths)
    if any(chains.held):
        # Up to which position the cache holds a node's tokens, for some piece that passes it.
        held_ends = [0] * len(trie)
        for node, held in zip(step.nodes, chains.held, strict=True):
            held_ends[node] = max(held_ends[node], held * BLOCK_TOKENS)
        for node in sorted(range(len(trie)), key=trie.ends.__getitem__, reverse=True):
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
