"""Answers to requests, piece by piece in the order of the request."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.requests.request import Tokens

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReadAnswer:
    """The answer to a `TokenRead`.

    Attributes:
        log_probabilities: one for each requested token.
        top_tokens: the most likely tokens, best first.
        top_log_probabilities: their log-probabilities.
    """

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredTokens:
    """Scores of the tokens of a piece. The first token of a sequence has no score: NaN and token -1.

    Attributes:
        log_probabilities: [tokens]
        top_tokens: [tokens, scored_top] the most likely tokens at each position, best first.
        top_log_probabilities: [tokens, scored_top]
    """

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PieceAnswer:
    """The answers to the reads of a piece, in order, and its scores and vector if it asked for them."""

    reads: tuple[ReadAnswer, ...] = ()
    scored: ScoredTokens | None = None
    vector: Floats | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and FLOPs of a request. FLOPs that several requests of a step share count for the first of them.

    Attributes:
        tokens: distinct tokens; a prefix shared by several sequences counts once.
        cached_tokens: tokens that came from the cache.
        flops: FLOPs of the computed tokens.
    """

    tokens: int
    cached_tokens: int
    flops: int


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Durations of a request in seconds.

    Attributes:
        queue_seconds: from arrival until a rank starts the request.
        compute_seconds: from that start until the answer.
    """

    queue_seconds: float
    compute_seconds: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """The answer to a request. `times` is None if durations were not measured."""

    id: str
    pieces: tuple[PieceAnswer, ...]
    usage: Usage
    times: AnswerTimes | None = None
