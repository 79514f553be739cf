"""Token sequences and the outputs to read from them, as one request that contains each shared prefix once.

Pseudo-code
    insert the sequences into a radix tree: a node for each run of tokens without a branch
    the nodes become the pieces of the request, parents first
    a position of a sequence is a position in a piece, which locates its output in the answer
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.serving.requests.answer import Answer, Floats, ReadAnswer
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Tokens, Vector

NO_NUMBERS = (
    "the model's outputs are NaN; its weights are damaged or overflow their dtype (serve the model in float32 to find "
    "out which)"
)


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    tokens: Tokens
    parent: _Node | None
    children: dict[int, _Node] = dataclasses.field(default_factory=dict)
    reads: dict[int, _Read] = dataclasses.field(default_factory=dict)
    is_scored: bool = False
    scored_top: int = 0
    vector: Vector | None = None
    number: int = -1


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    """The reads at one position: the column of each requested token, and the number of the most likely tokens."""

    columns: dict[int, int] = dataclasses.field(default_factory=dict)
    top: int = 0
    index: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredSequence:
    """The scores of a sequence's own tokens.

    Attributes:
        log_probabilities: [tokens]; NaN for the first token.
        top_tokens: [tokens, top], the most likely tokens at each position, best first.
        top_log_probabilities: [tokens, top], their log-probabilities.
    """

    log_probabilities: Floats
    top_tokens: Tokens
    top_log_probabilities: Floats


class RequestTree:
    """Collects sequences and reads; `request` makes them a request, and `TreeAnswer` looks up its answer."""

    def __init__(self, most_sequence_tokens: int) -> None:
        self._root = _Node(np.empty(0, np.int32), None)
        self._most = most_sequence_tokens
        self._sequences: list[Tokens] = []
        self._reads: list[tuple[int, int, Sequence[int], int]] = []
        self._scored: list[tuple[int, int]] = []
        self._vectors: list[tuple[int, Vector]] = []
        self._paths: list[tuple[list[int], list[_Node]]] = []

    def add(self, tokens: Tokens | Sequence[int], name: str = "the prompt") -> int:
        """Add a sequence and return its number. Raise InputError, with `name`, if it is empty or too long."""
        sequence = np.asarray(tokens, np.int32)
        if not len(sequence):
            raise InputError(f"{name} has no tokens; send at least one", name=name, value=0, expected="1 or more")
        if len(sequence) > self._most:
            raise InputError(
                f"{name} has {len(sequence)} tokens, but this model takes at most {self._most}; send a shorter text",
                name=name,
                value=len(sequence),
                expected=self._most,
            )
        self._sequences.append(sequence)
        return len(self._sequences) - 1

    def read(self, sequence: int, place: int, tokens: Sequence[int] = (), top: int = 0) -> None:
        """Ask for the prediction behind token `place` of a sequence: of `tokens`, and of the `top` most likely ones."""
        self._reads.append((sequence, place, tokens, top))

    def score(self, sequence: int, top: int = 0) -> None:
        """Ask for the log-probability of each of the sequence's own tokens, and of the `top` most likely ones."""
        self._scored.append((sequence, top))

    def vector(self, sequence: int, vector: Vector) -> None:
        """Ask for the embedding or the class scores of a sequence."""
        self._vectors.append((sequence, vector))

    def request(self, request_id: str, salt: bytes = b"") -> Request:
        """All of it as a request; call it once."""
        for sequence in self._sequences:
            self._insert(sequence)
        self._paths = [self._path(sequence) for sequence in self._sequences]
        for number, place, tokens, top in self._reads:
            node, offset = self.node_at(number, place)
            read = node.reads.setdefault(offset, _Read())
            read.top = max(read.top, top)
            for token in tokens:
                read.columns.setdefault(int(token), len(read.columns))
        for number, top in self._scored:
            for node in self._paths[number][1]:
                node.is_scored, node.scored_top = True, max(node.scored_top, top)
        for number, vector in self._vectors:
            end = self._paths[number][1][-1]
            if end.vector not in (None, vector):
                raise InputError(
                    f"one sequence cannot give the vectors {end.vector!r} and {vector!r} at once", name="vector"
                )
            end.vector = vector
        return Request(request_id, tuple(self._pieces()), salt)

    def length(self, sequence: int) -> int:
        return len(self._sequences[sequence])

    def nodes(self, sequence: int) -> list[_Node]:
        return self._paths[sequence][1]

    def node_at(self, sequence: int, place: int) -> tuple[_Node, int]:
        starts, nodes = self._paths[sequence]
        found = bisect.bisect_right(starts, place) - 1
        return nodes[found], place - starts[found]

    def _insert(self, tokens: Tokens) -> None:
        node, start = self._root, 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None:
                node.children[int(tokens[start])] = _Node(tokens[start:], node)
                return
            length = min(len(child.tokens), len(tokens) - start)
            differ = np.flatnonzero(child.tokens[:length] != tokens[start : start + length])
            same = int(differ[0]) if len(differ) else length
            if same < len(child.tokens):
                upper = _Node(child.tokens[:same], node)
                node.children[int(tokens[start])] = upper
                child.tokens, child.parent = child.tokens[same:], upper
                upper.children[int(child.tokens[0])] = child
                child = upper
            node, start = child, start + same

    def _path(self, tokens: Tokens) -> tuple[list[int], list[_Node]]:
        node, start, starts, nodes = self._root, 0, [], []
        while start < len(tokens):
            node = node.children[int(tokens[start])]
            starts.append(start)
            nodes.append(node)
            start += len(node.tokens)
        return starts, nodes

    def _pieces(self) -> list[TokenPiece]:
        pieces: list[TokenPiece] = []
        waiting = list(reversed(self._root.children.values()))
        while waiting:
            node = waiting.pop()
            waiting += reversed(node.children.values())
            node.number = len(pieces)
            reads: list[TokenRead] = []
            for place, read in sorted(node.reads.items()):
                read.index = len(reads)
                reads.append(TokenRead(place, np.array(list(read.columns), np.int32), read.top))
            pieces.append(
                TokenPiece(
                    -1 if node.parent is None else node.parent.number,
                    node.tokens,
                    tuple(reads),
                    node.is_scored,
                    node.scored_top,
                    node.vector,
                )
            )
        return pieces


class TreeAnswer:
    """The answer to the request of a tree, addressed by the tree's sequences and positions."""

    def __init__(self, tree: RequestTree, answer: Answer) -> None:
        self.tree = tree
        self.answer = answer

    def log_probabilities(self, sequence: int, place: int, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `tokens` behind `place`. Raise CheckpointError if one is NaN."""
        read, columns = self._read(sequence, place)
        values = read.log_probabilities[[columns[int(token)] for token in tokens]]
        log_probabilities: list[float] = _checked(values).tolist()
        return log_probabilities

    def top(self, sequence: int, place: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens behind `place` with their log-probabilities, best first."""
        read, _ = self._read(sequence, place)
        values = _checked(read.top_log_probabilities[:count]).tolist()
        return list(zip(read.top_tokens[:count].tolist(), values, strict=True))

    def scored(self, sequence: int) -> ScoredSequence:
        """Return the scores of the sequence's own tokens. Raise CheckpointError if one is NaN."""
        pieces = [self.answer.pieces[node.number].scored for node in self.tree.nodes(sequence)]
        scored = [piece for piece in pieces if piece is not None]
        top = min(piece.top_tokens.shape[1] for piece in scored)
        log_probabilities = np.concatenate([piece.log_probabilities for piece in scored])
        _checked(log_probabilities[1:])
        return ScoredSequence(
            log_probabilities,
            np.concatenate([piece.top_tokens[:, :top] for piece in scored]),
            np.concatenate([piece.top_log_probabilities[:, :top] for piece in scored]),
        )

    def vector(self, sequence: int) -> Floats:
        """Return the vector of the sequence. Raise CheckpointError if it contains NaN."""
        vector = self.answer.pieces[self.tree.nodes(sequence)[-1].number].vector
        assert vector is not None, "the request must ask for the vector"
        return _checked(vector)

    def _read(self, sequence: int, place: int) -> tuple[ReadAnswer, dict[int, int]]:
        node, offset = self.tree.node_at(sequence, place)
        read = node.reads[offset]
        return self.answer.pieces[node.number].reads[read.index], read.columns


def _checked(values: Floats) -> Floats:
    if np.isnan(values).any():
        raise CheckpointError(NO_NUMBERS, name="output")
    return values
