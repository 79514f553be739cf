"""The pieces of all requests of a step in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, Tokens


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestPieces:
    """The pieces of several requests, one request after the other.

    Attributes:
        pieces: all pieces; the other lists have one entry per piece, unless stated otherwise.
        tokens: [n] the tokens of all pieces, one piece after the other.
        first_pieces: [requests] the first piece of each request.
        requests: the request of each piece.
        parents: the piece before each piece, -1 if its sequence begins with it.
        starts: index into `tokens` of the first token of each piece.
        depths: position in its sequence at which each piece begins.
    """

    pieces: list[TokenPiece]
    tokens: Tokens
    first_pieces: list[int]
    requests: list[int]
    parents: list[int]
    starts: list[int]
    depths: list[int]

    def end(self, piece: int) -> int:
        """Return the index into `tokens` right after the last token of `piece`."""
        return self.starts[piece] + len(self.pieces[piece].tokens)


def request_pieces(requests: Sequence[Request]) -> RequestPieces:
    """Return the table of the pieces of `requests`."""
    pieces = [piece for request in requests for piece in request.pieces]
    table = RequestPieces(pieces, np.concatenate([NO_TOKENS, *(piece.tokens for piece in pieces)]), [], [], [], [], [])
    start = 0
    for number, request in enumerate(requests):
        first = len(table.starts)
        table.first_pieces.append(first)
        table.depths.extend(request.depths())
        for piece in request.pieces:
            table.requests.append(number)
            table.parents.append(first + piece.parent if piece.parent >= 0 else -1)
            table.starts.append(start)
            start += len(piece.tokens)
    return table
