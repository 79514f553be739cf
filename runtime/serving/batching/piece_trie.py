"""The trie of the pieces of many requests: equal tokens behind equal tokens are one node, whoever named them.

A request is a tree of pieces already, so pieces are merged, not full sequences: each is walked down from where its
parent ended, node by node, and whole labels of nodes are compared at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, Tokens

_TOKEN_BYTES = 4


@dataclasses.dataclass(eq=False, slots=True)
class PieceTrie:
    """Lists have an entry per piece of all requests, in order, or per node. The first nodes are roots without tokens.

    Nodes are given by two pairs of numbers: the first token of a node stands at `starts` in `tokens`, where it came
    first; `depths` and `ends` are the positions in their sequences where its tokens begin and end.
    """

    pieces: list[TokenPiece]
    tokens: Tokens
    # Per request: its first piece.
    request_pieces: list[int] = dataclasses.field(default_factory=list)
    # Per piece. Tokens begin at `piece_starts` in `tokens` and at `piece_depths` in their sequences. A piece ends with
    # the end of a node.
    piece_requests: list[int] = dataclasses.field(default_factory=list)
    piece_parents: list[int] = dataclasses.field(default_factory=list)
    piece_starts: list[int] = dataclasses.field(default_factory=list)
    piece_depths: list[int] = dataclasses.field(default_factory=list)
    piece_nodes: list[int] = dataclasses.field(default_factory=list)
    # Per node.
    starts: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    depths: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    # By the node above and the first token: node << 32 | token.
    children: dict[int, int] = dataclasses.field(default_factory=dict)

    def piece_end(self, piece: int) -> int:
        """Where the tokens of `piece` end in `tokens`."""
        return self.piece_starts[piece] + len(self.pieces[piece].tokens)

    def add_node(self, start: int, parent: int, depth: int, end: int) -> int:
        self.starts.append(start)
        self.parents.append(parent)
        self.depths.append(depth)
        self.ends.append(end)
        return len(self.starts) - 1


def build_trie(requests: Sequence[Request]) -> PieceTrie:
    """Merge the pieces of `requests`. Requests of different salt share no node."""
    pieces = [piece for request in requests for piece in request.pieces]
    tokens = np.concatenate([NO_TOKENS, *(piece.tokens for piece in pieces)]).astype(np.int32, copy=False)
    trie = PieceTrie(pieces, tokens)
    walk = _TrieWalk(trie)
    roots: dict[bytes, int] = {}
    at = 0
    for number, request in enumerate(requests):
        if request.salt not in roots:
            roots[request.salt] = trie.add_node(0, -1, 0, 0)
        root, first_piece = roots[request.salt], len(trie.piece_nodes)
        trie.request_pieces.append(first_piece)
        for piece in request.pieces:
            parent = first_piece + piece.parent if piece.parent >= 0 else -1
            before = trie.piece_nodes[parent] if parent >= 0 else root
            trie.piece_requests.append(number)
            trie.piece_parents.append(parent)
            trie.piece_starts.append(at)
            trie.piece_depths.append(trie.ends[before])
            stop = at + len(piece.tokens)
            trie.piece_nodes.append(walk.insert(before, at, stop))
            at = stop
    return trie


class _TrieWalk:
    """Walks down a trie and adds what is missing. Labels are compared as bytes, first tokens read as plain numbers."""

    def __init__(self, trie: PieceTrie) -> None:
        self._trie = trie
        self._bytes = trie.tokens.tobytes()
        self._tokens = trie.tokens.view(np.uint32).data

    def insert(self, node: int, at: int, stop: int) -> int:
        """The node that ends with tokens [at, stop), behind those of `node`."""
        trie = self._trie
        while at < stop:
            name = self._child_name(node, at)
            child = trie.children.get(name)
            if child is None:
                trie.children[name] = child = trie.add_node(at, node, trie.ends[node], trie.ends[node] + stop - at)
                return child
            length = trie.ends[child] - trie.depths[child]
            shared = self._shared(trie.starts[child], at, min(length, stop - at))
            node = child if shared == length else self._split(child, name, shared)
            at += shared
        return node

    def _child_name(self, node: int, at: int) -> int:
        return node << 32 | self._tokens[at]

    def _shared(self, left: int, right: int, most: int) -> int:
        """How many tokens from `left` on are those from `right` on, at most `most`."""
        width = _TOKEN_BYTES
        if self._bytes[left * width : (left + most) * width] == self._bytes[right * width : (right + most) * width]:
            return most
        tokens = self._trie.tokens
        return int(np.argmax(tokens[left : left + most] != tokens[right : right + most]))

    def _split(self, node: int, name: int, count: int) -> int:
        """Give the first `count` tokens of `node` to a new node above it, so that what has ended with it still does."""
        trie = self._trie
        start, parent, depth = trie.starts[node], trie.parents[node], trie.depths[node]
        above = trie.children[name] = trie.add_node(start, parent, depth, depth + count)
        trie.starts[node], trie.parents[node], trie.depths[node] = start + count, above, depth + count
        trie.children[self._child_name(above, start + count)] = node
        return above
