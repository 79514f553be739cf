"""What a step reads of its states, and how answers are put together from it.

Pseudo-code
    reads      the row of each, with the tokens that are asked for
    scores     the row that predicts each scored token; what lies beside a cached block is taken from there
    all pairs of row and token are scored at once, ordered by row; then every piece gets its part
    vectors    the row of the last token, or the mean over the rows of the whole sequence
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from moepass.runtime.serving.batching.pack import PackedStep
from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.cache.block_scores import BlockScores
from moepass.runtime.serving.engine.token_scores import TokenScores, WantedScores
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, ScoredTokens
from moepass.runtime.serving.requests.request import NO_TOKENS, Request


class StepReads:
    """The reads of a packed step; `wanted` are the scores that they take.

    With `keeps_scores` the most likely token is read in the place of every scored one, because the cache keeps it
    beside the score.
    """

    def __init__(self, packed: PackedStep, requests: Sequence[Request], *, keeps_scores: bool) -> None:
        self._packed, self._requests = packed, requests
        reads = [read for request in requests for piece in request.pieces for read in piece.reads]
        self._read_rows = self._rows_of(packed.read_positions)
        counts = np.array([len(read.tokens) for read in reads], np.int64)
        self._read_ends = np.cumsum(counts)
        scores = packed.scores
        self._now = np.flatnonzero(scores.predicted_at >= 0)
        self._scored_rows = self._rows_of(scores.predicted_at[self._now])
        tops = [requests[number].pieces[piece].scored_top for number, piece in scores.pieces]
        self._most_scored_top = max([int(keeps_scores), *tops])
        scored_tops = np.repeat(np.maximum(np.array(tops, np.int64), int(keeps_scores)), np.diff(scores.starts))

        top = np.zeros(len(packed.batch.places), np.int64)
        np.maximum.at(top, self._read_rows, np.array([read.top for read in reads], np.int64))
        np.maximum.at(top, self._scored_rows, scored_tops[self._now])
        rows = np.concatenate((np.repeat(self._read_rows, counts), self._scored_rows))
        tokens = np.concatenate((NO_TOKENS, *(read.tokens for read in reads), scores.tokens[self._now]))
        order = np.argsort(rows, kind="stable")
        is_ranked = np.arange(len(rows)) >= counts.sum()
        self.wanted = WantedScores(rows[order], tokens[order].astype(np.int64), is_ranked[order], top)
        # Where each pair stands among those that are ordered by row.
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))

    def answers(
        self, scores: TokenScores, vectors: Callable[[Indices], torch.Tensor], cached: BlockScores
    ) -> tuple[Answer, ...]:
        """The answers to all requests.

        `scores` are those that are `wanted`; `vectors` gives what the head makes of the states of rows, [rows, width];
        `cached` holds what lies beside blocks of the cache.
        """
        reads = iter(self._read_answers(scores))
        scored = self._scored_pieces(self.scored(scores, cached))
        found = []
        for number, (request, placement) in enumerate(zip(self._requests, self._packed.placements, strict=True)):
            pieces = []
            for place, piece in enumerate(request.pieces):
                vector = None
                if piece.vector is not None:
                    rows = self._rows_of(placement.vector_positions(place))
                    vector = vectors(rows).float().mean(0).cpu().numpy()
                pieces.append(PieceAnswer(tuple(next(reads) for _ in piece.reads), scored.get((number, place)), vector))
            found.append(Answer(request.id, tuple(pieces), placement.usage))
        return tuple(found)

    def scored(self, scores: TokenScores, cached: BlockScores) -> ScoredTokens:
        """The scores of all tokens of all scored pieces, as `PackedStep.scores` has them."""
        places = self._packed.scores
        count, top = len(places.tokens), self._most_scored_top
        found = ScoredTokens(
            np.full(count, np.nan, np.float32),
            np.zeros(count, np.int32),
            np.full((count, top), -1, np.int32),
            np.full((count, top), np.nan, np.float32),
        )
        pairs = self._place[len(self._place) - len(self._now) :]
        found.log_probabilities[self._now], found.ranks[self._now] = (
            scores.log_probabilities[pairs],
            scores.ranks[pairs],
        )
        if len(self._now):
            found.top_tokens[self._now] = scores.top_tokens[self._scored_rows, :top]
            found.top_log_probabilities[self._now] = scores.top_log_probabilities[self._scored_rows, :top]
        kept = np.flatnonzero(places.score_slots >= 0)
        if len(kept):
            lying = cached.read(places.score_slots[kept], 1)
            found.log_probabilities[kept], found.ranks[kept] = lying.log_probabilities, lying.ranks
            found.top_tokens[kept, :1] = lying.top_tokens
            found.top_log_probabilities[kept, :1] = lying.top_log_probabilities
        return found

    def _scored_pieces(self, scored: ScoredTokens) -> dict[tuple[int, int], ScoredTokens]:
        places = self._packed.scores
        found = {}
        for key, start, end in zip(places.pieces, places.starts[:-1], places.starts[1:], strict=True):
            top = self._requests[key[0]].pieces[key[1]].scored_top
            found[key] = ScoredTokens(
                scored.log_probabilities[start:end],
                scored.ranks[start:end],
                scored.top_tokens[start:end, :top],
                scored.top_log_probabilities[start:end, :top],
            )
        return found

    def _read_answers(self, scores: TokenScores) -> list[ReadAnswer]:
        values = scores.log_probabilities[self._place]
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
        return np.searchsorted(self._packed.batch.places, positions)
