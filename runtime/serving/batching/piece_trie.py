"""The trie of a step: the pieces of all requests, merged where their tokens are equal.

A request is a tree of pieces already. So only pieces are compared, each from the end of its parent on, not whole
sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.runtime.serving.batching.request_pieces import RequestPieces
from moepass.runtime.serving.requests.request import Request
from moepass.runtime.serving.requests.token_trie import TokenTrie


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PieceTrie:
    """A trie of the tokens of all pieces; each piece ends with the end of a node.

    Attributes:
        pieces: the pieces of all requests.
        trie: a trie of `pieces.tokens`. Each salt has its own root.
        nodes: [pieces] the node with the last token of each piece.
    """

    pieces: RequestPieces
    trie: TokenTrie
    nodes: list[int]


def piece_trie(pieces: RequestPieces, requests: Sequence[Request]) -> PieceTrie:
    """Return the trie of the `pieces` of `requests`. Requests with different salts share no node."""
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
