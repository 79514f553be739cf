"""What a step answers to a request, piece by piece in the request's own order."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.requests.request import Tokens

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReadAnswer:
    """Log-probabilities of the tokens that were asked for, and the most likely tokens with theirs, best first."""

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScoredTokens:
    """Of each token of a piece: its log-probability, its rank (1: the most likely), and the most likely tokens.

    Shapes: [tokens], [tokens], and [tokens, scored_top] twice. The first token of a request has NaN, 0 and -1.
    """

    log_probabilities: Floats
    ranks: Tokens
    top_tokens: Tokens
    top_log_probabilities: Floats


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PieceAnswer:
    reads: tuple[ReadAnswer, ...] = ()
    scored: ScoredTokens | None = None
    vector: Floats | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the request, a shared prefix counted once; how many of them came from the cache; FLOPs of the others.

    FLOPs that several requests of a step share are counted for the first of them.
    """

    tokens: int
    cached_tokens: int
    flops: int


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Seconds that a request waited until a rank began it, and those from then until its answer."""

    queue_seconds: float
    compute_seconds: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """`times` are None where nobody measured them."""

    id: str
    pieces: tuple[PieceAnswer, ...]
    usage: Usage
    times: AnswerTimes | None = None
