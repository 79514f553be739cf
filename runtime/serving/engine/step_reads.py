"""What a step reads of its states, and how answers are put together from it.

Pseudo-code
    for each request, for each of its pieces:
        reads      rows of the step's places, with the tokens that are asked for
        scores     the row that predicts each token; what lies beside a cached block is taken from there
        vector     the row of the last token, or the rows of the whole sequence
    all pairs of row and token are scored at once, ordered by row; then every piece gets its part
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from moepass.runtime.serving.batching.pack import PackedStep
from moepass.runtime.serving.batching.placement import RequestPlacement
from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.cache.block_scores import BlockScores
from moepass.runtime.serving.engine.token_scores import TokenScores, WantedScores
from moepass.runtime.serving.requests.answer import Answer, Floats, PieceAnswer, ReadAnswer, ScoredTokens
from moepass.runtime.serving.requests.request import Request, TokenPiece, Tokens


@dataclasses.dataclass(eq=False, slots=True)
class _PieceReads:
    """Where the pairs of a piece begin among all pairs, and the rows that its most likely tokens are read in."""

    piece: TokenPiece
    read_rows: list[int]
    first_pairs: list[int]
    scored_rows: Indices | None = None
    scored_pairs: int = 0
    score_slots: Indices | None = None
    vector_rows: Indices | None = None


class StepReads:
    """The reads of a packed step. `wanted` are the scores that they take, `vector_rows` the states."""

    def __init__(self, packed: PackedStep, requests: Sequence[Request]) -> None:
        self._packed, self._requests = packed, requests
        self._rows: list[Indices] = []
        self._tokens: list[Indices] = []
        self._ranked: list[bool] = []
        self._pairs = 0
        self._top = np.zeros(len(packed.batch.places), np.int64)
        self._reads = [
            list(self._of_request(request, placement))
            for request, placement in zip(requests, packed.placements, strict=True)
        ]
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        ranked = np.repeat(np.array(self._ranked, np.bool_), [len(rows) for rows in self._rows])
        self._order = np.argsort(rows, kind="stable")
        tokens = np.concatenate([np.empty(0, np.int64), *self._tokens])
        self.wanted = WantedScores(rows[self._order], tokens[self._order], ranked[self._order], self._top)

    def answers(
        self,
        scores: TokenScores,
        vectors: Callable[[Indices], torch.Tensor],
        cached: BlockScores,
    ) -> tuple[Answer, ...]:
        """The answers to all requests.

        `scores` are those that are `wanted`; `vectors` gives what the head makes of the states of rows, [rows, width];
        `cached` holds what lies beside blocks of the cache.
        """
        place = np.empty(len(self._order), np.int64)
        place[self._order] = np.arange(len(self._order))
        log_probabilities, ranks = scores.log_probabilities[place], scores.ranks[place]
        return tuple(
            Answer(
                request.id,
                tuple(
                    PieceAnswer(
                        tuple(_read_answers(reads, log_probabilities, scores)),
                        _scored(reads, log_probabilities, ranks, scores, cached),
                        None if reads.vector_rows is None else vectors(reads.vector_rows).float().mean(0).cpu().numpy(),
                    )
                    for reads in pieces
                ),
                placement.usage,
            )
            for request, placement, pieces in zip(self._requests, self._packed.placements, self._reads, strict=True)
        )

    def keep_scores(self, answers: Sequence[Answer], stored: Mapping[int, int], scores: BlockScores) -> None:
        """Write what the step scored beside blocks of the cache: those that it read, and those that it has `stored`,
        by position in the stream.
        """
        for placement, pieces, answer in zip(self._packed.placements, self._reads, answers, strict=True):
            for number, reads in enumerate(pieces):
                found = answer.pieces[number].scored
                if found is None or reads.scored_rows is None or not reads.piece.scored_top:
                    continue  # the cache keeps the most likely token beside a score, or nothing
                slots = placement.cache_slots(number)
                fresh = np.array([stored.get(position, -1) for position in placement.positions(number).tolist()])
                slots = np.where(fresh >= 0, fresh, slots)
                scores.write(np.where(reads.scored_rows >= 0, slots, -1), found)

    # ---- Collecting

    def _of_request(self, request: Request, placement: RequestPlacement) -> Iterator[_PieceReads]:
        read_rows = iter(self._rows_of(placement.read_positions()).tolist())
        for number, piece in enumerate(request.pieces):
            found = _PieceReads(piece, [], [])
            for read in piece.reads:
                row = next(read_rows)
                found.read_rows.append(row)
                found.first_pairs.append(self._add(np.full(len(read.tokens), row, np.int64), read.tokens, False))
                self._top[row] = max(self._top[row], read.top)
            if piece.is_scored:
                predicted_at = placement.predicted_at(number)
                found.scored_rows = np.where(predicted_at >= 0, self._rows_of(predicted_at), -1)
                known = found.scored_rows >= 0
                found.scored_pairs = self._add(found.scored_rows[known], piece.tokens[known], True)
                found.score_slots = placement.score_slots(number)
                rows = found.scored_rows[known]
                self._top[rows] = np.maximum(self._top[rows], piece.scored_top)
            if piece.vector == "last":
                found.vector_rows = self._rows_of(placement.positions(number)[-1:])
            elif piece.vector == "mean":
                positions = [placement.positions(part) for part in request.path(number)]
                found.vector_rows = self._rows_of(np.concatenate(positions))
            yield found

    def _rows_of(self, positions: Indices) -> Indices:
        return np.searchsorted(self._packed.batch.places, positions)

    def _add(self, rows: Indices, tokens: Tokens, is_ranked: bool) -> int:
        """The number of the first of these pairs."""
        first = self._pairs
        self._rows.append(rows)
        self._tokens.append(tokens.astype(np.int64))
        self._ranked.append(is_ranked)
        self._pairs += len(rows)
        return first


def _read_answers(reads: _PieceReads, log_probabilities: Floats, scores: TokenScores) -> Iterator[ReadAnswer]:
    for read, row, first in zip(reads.piece.reads, reads.read_rows, reads.first_pairs, strict=True):
        yield ReadAnswer(
            log_probabilities[first : first + len(read.tokens)],
            scores.top_tokens[row, : read.top],
            scores.top_log_probabilities[row, : read.top],
        )


def _scored(
    reads: _PieceReads,
    log_probabilities: Floats,
    ranks: Tokens,
    scores: TokenScores,
    cached: BlockScores,
) -> ScoredTokens | None:
    if reads.scored_rows is None or reads.score_slots is None:
        return None
    count, top = len(reads.piece.tokens), reads.piece.scored_top
    found = ScoredTokens(
        np.full(count, np.nan, np.float32),
        np.zeros(count, np.int32),
        np.full((count, top), -1, np.int32),
        np.full((count, top), np.nan, np.float32),
    )
    now = np.flatnonzero(reads.scored_rows >= 0)
    pairs = slice(reads.scored_pairs, reads.scored_pairs + len(now))
    found.log_probabilities[now], found.ranks[now] = log_probabilities[pairs], ranks[pairs]
    if len(now):
        found.top_tokens[now] = scores.top_tokens[reads.scored_rows[now], :top]
        found.top_log_probabilities[now] = scores.top_log_probabilities[reads.scored_rows[now], :top]
    kept = np.flatnonzero(reads.score_slots >= 0)
    if len(kept):
        lying = cached.read(reads.score_slots[kept], top)
        found.log_probabilities[kept], found.ranks[kept] = lying.log_probabilities, lying.ranks
        found.top_tokens[kept] = lying.top_tokens
        found.top_log_probabilities[kept] = lying.top_log_probabilities
    return found
