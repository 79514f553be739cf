"""The pieces of all requests of a step: in one table, and as a trie in which pieces with equal tokens are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, Tokens
from moepass.runtime.serving.requests.token_trie import TokenTrie


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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PieceTrie:
    """A trie of `pieces.tokens`, with a root for each salt; `nodes` [pieces] are the nodes that end with each piece."""

    pieces: RequestPieces
    trie: TokenTrie
    nodes: list[int]


def piece_trie(pieces: RequestPieces, requests: Sequence[Request]) -> PieceTrie:
    """Return the trie of the `pieces` of `requests`. Requests with different salts share no node.

    A request is a tree of pieces already. So only pieces are compared, each from the end of its parent on.
    """
    trie = TokenTrie(pieces.tokens)
    nodes: list[int] = []
    roots: dict[bytes, int] = {}
    for piece, parent in enumerate(pieces.parents):
        salt = requests[pieces.requests[piece]].salt
        if salt not in roots:
            roots[salt] = trie.add_root()
        before = nodes[parent] if parent >= 0 else roots[salt]
        nodes.append(trie.insert(before, pieces.starts[piece], pieces.end(piece)))
    return PieceTrie(pieces, trie, nodes)
