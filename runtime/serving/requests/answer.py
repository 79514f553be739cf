"""Answers to requests, piece by piece in the order of the request."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.requests.request import Tokens

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReadAnswer:
    """The answer to a `TokenRead`: the requested tokens' log-probabilities, and the most likely tokens, best first."""

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredTokens:
    """Scores [tokens] of the tokens of a piece, and the most likely tokens [tokens, scored_top] at their positions.

    The first token of a sequence has no score: NaN and token -1.
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
    """The distinct tokens of a request, how many came from the cache, and the FLOPs of the computed tokens.

    FLOPs that several requests of a step share count for the first of them.
    """

    tokens: int
    cached_tokens: int
    flops: int


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerTimes:
    """The time from a request's arrival until a rank starts it, and from then until the answer."""

    queue_seconds: float
    compute_seconds: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """The answer to a request. `times` is None if durations were not measured."""

    id: str
    pieces: tuple[PieceAnswer, ...]
    usage: Usage
    times: AnswerTimes | None = None
