"""Requests: trees of token pieces, and what to read of the model's output at their tokens.

A prompt with 100 questions is one piece with 100 children, and a label of several tokens is a child of its question.
So a request stores a shared prefix once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError

Tokens = npt.NDArray[np.int32]
NO_TOKENS: Tokens = np.empty(0, np.int32)

Vector = Literal["last", "mean"]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenRead:
    """A read of the model's prediction for the position after token `index` of a piece.

    The answer has the log-probabilities of `tokens`, and the `top` most likely tokens with their log-probabilities.
    These are natural logarithms over the whole vocabulary.
    """

    index: int
    tokens: Tokens
    top: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenPiece:
    """A run of one or more tokens of a request.

    Attributes:
        parent: index of the piece before it, an earlier one; -1 if a sequence begins here.
        is_scored: return the log-probability of each token of the piece. The first token of a sequence has none.
        scored_top: number of most likely tokens to return at each scored position.
        vector: which vector (class scores or an embedding) to return for the sequence that ends with this piece: its
            last token's, or the mean over all its tokens.
    """

    parent: int
    tokens: Tokens
    reads: tuple[TokenRead, ...] = ()
    is_scored: bool = False
    scored_top: int = 0
    vector: Vector | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A tree of tokens, parents first, that is answered as a whole. Its id is unique among its sender's requests.

    Requests with different salts share neither cached nor computed tokens.

    Raises InputError if there is no piece, a piece has no tokens, a parent is not an earlier piece, or a read lies
    outside its piece.
    """

    id: str
    pieces: tuple[TokenPiece, ...]
    salt: bytes = b""

    def __post_init__(self) -> None:
        if not self.pieces:
            raise InputError(f"request {self.id} has no pieces", name="pieces", expected="1 or more")
        for number, piece in enumerate(self.pieces):
            where = f"piece {number} of request {self.id}"
            if not len(piece.tokens):
                raise InputError(f"{where} has no tokens", name="tokens", expected="1 or more")
            if not -1 <= piece.parent < number:
                problem = f"{where} has parent {piece.parent}; a parent must be an earlier piece, or -1"
                raise InputError(problem, name="parent", value=piece.parent, expected=range(-1, number))
            for read in piece.reads:
                if not 0 <= read.index < len(piece.tokens):
                    problem = f"{where} has a read at index {read.index}; the piece has {len(piece.tokens)} tokens"
                    raise InputError(problem, name="index", value=read.index, expected=range(len(piece.tokens)))

    def depths(self) -> list[int]:
        """Return for each piece how many tokens of its sequence come before it."""
        depths: list[int] = []
        for piece in self.pieces:
            is_first = piece.parent < 0
            depths.append(0 if is_first else depths[piece.parent] + len(self.pieces[piece.parent].tokens))
        return depths
