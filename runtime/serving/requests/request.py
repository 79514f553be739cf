"""A request: a tree of token pieces, and what to read behind which of their tokens.

A prompt with 100 questions behind it is one piece with 100 children; a label of several tokens is a child of its
question. So what questions share is named once, however many there are.
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
    """What to read of the model's prediction behind the token at `place` of a piece.

    Log-probabilities of `tokens` as the next token, and the `top` most likely ones. Natural logarithms, over the whole
    vocabulary.
    """

    place: int
    tokens: Tokens
    top: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TokenPiece:
    """One or more `tokens` behind those of the piece `parent`, an index of an earlier piece; -1: at the beginning.

    is_scored    the log-probability and the rank of each of its tokens is asked for, and the `scored_top` most likely
                 tokens in the place of each. The first token of a request has none: nothing precedes it
    vector       the vector that the model's head gives (scores of classes, or an embedding) for the sequence that
                 ends with this piece: that of its last token, or the mean over its tokens
    """

    parent: int
    tokens: Tokens
    reads: tuple[TokenRead, ...] = ()
    is_scored: bool = False
    scored_top: int = 0
    vector: Vector | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Request:
    """What one client asks, to be answered as a whole. Requests with another `salt` share nothing in a cache.

    Raises InputError for no piece, a piece without tokens, a parent that is no earlier piece, and a read outside its
    piece.
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
                raise InputError(
                    f"{where} has parent {piece.parent}; it must be an earlier piece, or -1",
                    name="parent",
                    value=piece.parent,
                    expected=range(-1, number),
                )
            for read in piece.reads:
                if not 0 <= read.place < len(piece.tokens):
                    raise InputError(
                        f"{where} is read at {read.place}; it has {len(piece.tokens)} tokens",
                        name="place",
                        value=read.place,
                        expected=range(len(piece.tokens)),
                    )

    def depths(self) -> list[int]:
        """Return for each piece how many tokens of its sequence come before it."""
        depths: list[int] = []
        for piece in self.pieces:
            is_first = piece.parent < 0
            depths.append(0 if is_first else depths[piece.parent] + len(self.pieces[piece.parent].tokens))
        return depths

    def path(self, number: int) -> tuple[int, ...]:
        """The pieces from the beginning to piece `number`, which is the last."""
        found = [number]
        while (number := self.pieces[number].parent) >= 0:
            found.append(number)
        return tuple(reversed(found))
