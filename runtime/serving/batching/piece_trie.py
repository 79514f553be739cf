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
    children: list[dict[bytes, int]] = dataclasses.field(default_factory=list)

    def add_node(self, start: int, parent: int, depth: int, end: int) -> int:
        self.starts.append(start)
        self.parents.append(parent)
        self.depths.append(depth)
        self.ends.append(end)
        self.children.append({})
        return len(self.starts) - 1


def build_trie(requests: Sequence[Request]) -> PieceTrie:
    """Merge the pieces of `requests`. Requests of different salt share no node."""
    pieces = [piece for request in requests for piece in request.pieces]
    tokens = np.concatenate([NO_TOKENS, *(piece.tokens for piece in pieces)]).astype(np.int32, copy=False)
    trie = PieceTrie(pieces, tokens)
    data = trie.tokens.tobytes()
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
            trie.piece_nodes.append(_insert(trie, data, before, at, stop))
            at = stop
    return trie


def _insert(trie: PieceTrie, data: bytes, node: int, at: int, stop: int) -> int:
    """The node that ends with tokens [at, stop), behind those of `node`."""
    width = _TOKEN_BYTES
    starts, depths, ends, children = trie.starts, trie.depths, trie.ends, trie.children
    while at < stop:
        name = data[at * width : (at + 1) * width]
        child = children[node].get(name)
        if child is None:
            children[node][name] = child = trie.add_node(at, node, ends[node], ends[node] + stop - at)
            return child
        start = starts[child]
        length = ends[child] - depths[child]
        shared = min(length, stop - at)
        if data[start * width : (start + shared) * width] != data[at * width : (at + shared) * width]:
            shared = int(np.argmax(trie.tokens[start : start + shared] != trie.tokens[at : at + shared]))
        node = child if shared == length else _split(trie, data, child, name, shared)
        at += shared
    return node


def _split(trie: PieceTrie, data: bytes, node: int, name: bytes, count: int) -> int:
    """Give the first `count` tokens of `node` to a new node above it, so that what has ended with `node` still does."""
    start, parent, depth = trie.starts[node], trie.parents[node], trie.depths[node]
    above = trie.add_node(start, parent, depth, depth + count)
    trie.children[parent][name] = above
    trie.starts[node], trie.parents[node], trie.depths[node] = start + count, above, depth + count
    trie.children[above][data[trie.starts[node] * _TOKEN_BYTES : (trie.starts[node] + 1) * _TOKEN_BYTES]] = node
    return above
