"""The reads of a step, and the answers made from its states.

Pseudo-code
    reads      the row of each read, with its tokens
    scores     the row that predicts each scored token; cached scores need no row
    all pairs of row and token are scored at once, ordered by row; then each piece gets its results
    vectors    the row of the last token, or the mean over the rows of the sequence
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moepass.runtime.serving.batching.pack import PackedStep
from moepass.runtime.serving.batching.step_batch import NO_INDICES, Indices
from moepass.runtime.serving.cache.block_index import BlockScores
from moepass.runtime.serving.engine.token_scores import TokenScores, WantedScores
from moepass.runtime.serving.requests.answer import Answer, Floats, PieceAnswer, ReadAnswer, ScoredTokens
from moepass.runtime.serving.requests.request import NO_TOKENS, Request


class StepReads:
    """The reads of a packed step, and the scores `wanted` for them.

    A row is the state at one of `batch.output_positions`. With `keeps_scores`, the most likely token is read at each
    scored position, because the cache stores it with the score.
    """

    def __init__(self, packed: PackedStep, requests: Sequence[Request], *, keeps_scores: bool) -> None:
        self._packed, self._requests = packed, requests
        reads = [read for request in requests for piece in request.pieces for read in piece.reads]
        self._read_rows = self._rows_of(packed.read_positions)
        vector_rows = [
            self._rows_of(placement.vector_positions(index))
            for request, placement in zip(requests, packed.placements, strict=True)
            for index, piece in enumerate(request.pieces)
            if piece.vector is not None
        ]
        self.vector_counts = list(map(len, vector_rows))
        counts = np.array([len(read.tokens) for read in reads], np.int64)
        self._read_ends = np.cumsum(counts)
        scores = packed.scores
        self._computed = np.flatnonzero(scores.predicted_at >= 0)
        self._scored_rows = self._rows_of(scores.predicted_at[self._computed])
        tops = [requests[number].pieces[piece].scored_top for number, piece in scores.pieces]
        self._most_scored_top = max([int(keeps_scores), *tops])
        scored_tops = np.repeat(np.maximum(np.array(tops, np.int64), int(keeps_scores)), np.diff(scores.starts))

        top = np.zeros(len(packed.batch.output_positions), np.int64)
        np.maximum.at(top, self._read_rows, np.array([read.top for read in reads], np.int64))
        np.maximum.at(top, self._scored_rows, scored_tops[self._computed])
        rows = np.concatenate((np.repeat(self._read_rows, counts), self._scored_rows))
        tokens = np.concatenate((NO_TOKENS, *(read.tokens for read in reads), scores.tokens[self._computed]))
        order = np.argsort(rows, kind="stable")
        self.wanted = WantedScores(rows[order], tokens[order].astype(np.int64), top)
        # What the device needs: the indices of the wanted scores, and the rows of all vectors.
        self.indices = (*self.wanted.indices, torch.from_numpy(np.concatenate((NO_INDICES, *vector_rows))))
        # Index of each pair among the pairs that are ordered by row.
        self._pair_order = np.empty(len(order), np.int64)
        self._pair_order[order] = np.arange(len(order))

    def answers(self, scores: TokenScores, vectors: Floats, cached: BlockScores) -> tuple[Answer, ...]:
        """Return the answers to all requests; `vectors` [vectors, width] has a row for each of `vector_counts`."""
        reads, vector_of = iter(self._read_answers(scores)), iter(vectors)
        scored = self._scored_pieces(self.scored(scores, cached))
        answers = []
        for number, (request, placement) in enumerate(zip(self._requests, self._packed.placements, strict=True)):
            pieces = []
            for index, piece in enumerate(request.pieces):
                vector = None if piece.vector is None else next(vector_of)
                pieces.append(PieceAnswer(tuple(next(reads) for _ in piece.reads), scored.get((number, index)), vector))
            answers.append(Answer(request.id, tuple(pieces), placement.usage))
        return tuple(answers)

    def scored(self, scores: TokenScores, cached: BlockScores) -> ScoredTokens:
        """Return the scores of all tokens of all scored pieces, in the order of `PackedStep.scores`."""
        sources = self._packed.scores
        count, top = len(sources.tokens), self._most_scored_top
        scored = ScoredTokens(
            np.full(count, np.nan, np.float32),
            np.full((count, top), -1, np.int32),
            np.full((count, top), np.nan, np.float32),
        )
        computed, from_cache = self._computed, np.flatnonzero(sources.score_slots >= 0)
        if len(computed):
            pairs = self._pair_order[-len(computed) :]
            scored.log_probabilities[computed] = scores.log_probabilities[pairs]
            scored.top_tokens[computed] = scores.top_tokens[self._scored_rows, :top]
            scored.top_log_probabilities[computed] = scores.top_log_probabilities[self._scored_rows, :top]
        if len(from_cache):
            cached_scores = cached.read(sources.score_slots[from_cache])
            scored.log_probabilities[from_cache] = cached_scores.log_probabilities
            scored.top_tokens[from_cache, :1] = cached_scores.top_tokens
            scored.top_log_probabilities[from_cache, :1] = cached_scores.top_log_probabilities
        return scored

    def _scored_pieces(self, scored: ScoredTokens) -> dict[tuple[int, int], ScoredTokens]:
        sources = self._packed.scores
        pieces = {}
        for key, start, end in zip(sources.pieces, sources.starts[:-1], sources.starts[1:], strict=True):
            top = self._requests[key[0]].pieces[key[1]].scored_top
            pieces[key] = ScoredTokens(
                scored.log_probabilities[start:end],
                scored.top_tokens[start:end, :top],
                scored.top_log_probabilities[start:end, :top],
            )
        return pieces

    def _read_answers(self, scores: TokenScores) -> list[ReadAnswer]:
        values = scores.log_probabilities[self._pair_order]
        reads = (read for request in self._requests for piece in request.pieces for read in piece.reads)
        return [
            ReadAnswer(
                values[end - len(read.tokens) : end],
                scores.top_tokens[row, : read.top],
                scores.top_log_probabilities[row, : read.top],
            )
            for read, row, end in zip(reads, self._read_rows.tolist(), self._read_ends.tolist(), strict=True)
        ]

    def _rows_of(self, positions: Indices) -> Indices:
        return np.searchsorted(self._packed.batch.output_positions, positions)
