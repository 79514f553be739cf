"""Token sequences and the outputs to read from them, as one request that contains each shared prefix once.

Pseudo-code
    insert the sequences into a radix tree: a node for each run of tokens without a branch
    the nodes become the pieces of the request, parents first
    map each position of a sequence to a piece and an offset, which locate its output in the answer
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.serving.requests.answer import Answer, Floats, ReadAnswer, ScoredTokens
from moepass.runtime.serving.requests.backend import SequenceTooLongError
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead, Tokens, Vector
from moepass.runtime.serving.requests.token_trie import TokenTrie

NO_NUMBERS = (
    "the model's outputs are NaN; its weights are damaged or overflow their dtype (serve the model in float32 to find "
    "out which)"
)
# JSON has no infinity. OpenAI writes this value for a token with a probability of almost 0.
LEAST_LOG_PROBABILITY = -9999.0


@dataclasses.dataclass(slots=True, eq=False)
class _PieceDraft:
    """A piece of the request in the making; `reads` by their index among its tokens."""

    number: int
    reads: dict[int, _Read] = dataclasses.field(default_factory=dict)
    is_scored: bool = False
    scored_top: int = 0
    vector: Vector | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    """The reads at one position: the column of each requested token, and the number of the most likely tokens."""

    columns: dict[int, int] = dataclasses.field(default_factory=dict)
    top: int = 0
    index: int = -1


class RequestTree:
    """Collects sequences and reads; `request` makes them a request, and `TreeAnswer` looks up its answer."""

    def __init__(self, most_sequence_tokens: int) -> None:
        self._most = most_sequence_tokens
        self._sequences: list[Tokens] = []
        self._reads: list[tuple[int, int, Sequence[int], int]] = []
        self._scored: list[tuple[int, int]] = []
        self._vectors: list[tuple[int, Vector]] = []
        # Of each sequence, where its pieces begin, and the pieces.
        self._paths: list[tuple[list[int], list[_PieceDraft]]] = []

    def add(self, tokens: Tokens | Sequence[int], name: str = "the prompt") -> int:
        """Add a sequence and return its number. Raise InputError, with `name`, for no tokens or too many."""
        sequence = np.asarray(tokens, np.int32)
        if not len(sequence):
            raise InputError(f"{name} has no tokens; send at least one", name=name, value=0, expected="1 or more")
        if len(sequence) > self._most:
            text = f"{name} has {len(sequence)} tokens, but this model takes at most {self._most}; send a shorter text"
            raise SequenceTooLongError(text, name=name, value=len(sequence), expected=self._most)
        self._sequences.append(sequence)
        return len(self._sequences) - 1

    def add_classified(self, tokens: Tokens | Sequence[int], padding: int | None, name: str = "the prompt") -> int:
        """Add a sequence whose class scores are requested, and return its number. Raise InputError as `add` does.

        transformers reads them at the last token that is not `padding`, or at the first token if all are. The tokens
        behind it change nothing, so they are not added.
        """
        sequence = np.asarray(tokens, np.int32)
        if padding is not None:
            text_tokens = np.flatnonzero(sequence != padding)
            sequence = sequence[: int(text_tokens[-1]) + 1 if len(text_tokens) else 1]
        number = self.add(sequence, name)
        self.vector(number, "last")
        return number

    def read(self, sequence: int, index: int, tokens: Sequence[int] = (), top: int = 0) -> None:
        """Request predictions for the position after token `index` of a sequence.

        They are the log-probabilities of `tokens`, and the `top` most likely tokens with their log-probabilities.
        """
        self._reads.append((sequence, index, tokens, top))

    def score(self, sequence: int, top: int = 0) -> None:
        """Request the log-probability of each token, and of the `top` most likely tokens at its position."""
        self._scored.append((sequence, top))

    def vector(self, sequence: int, vector: Vector) -> None:
        """Request the embedding or the class scores of a sequence, of the same kind for all equal sequences."""
        self._vectors.append((sequence, vector))

    def request(self, request_id: str, salt: bytes = b"") -> Request:
        """Return all sequences and reads as one request. Call it once."""
        trie = TokenTrie(np.concatenate([NO_TOKENS, *self._sequences]))
        root = trie.add_root()
        stops = list(itertools.accumulate(map(len, self._sequences), initial=0))
        ends = [trie.insert(root, start, stop) for start, stop in itertools.pairwise(stops)]
        # Roots have no tokens and become no piece.
        nodes = trie.depth_first()[1:]
        pieces = {node: _PieceDraft(number) for number, node in enumerate(nodes)}
        self._paths = [_path(trie, pieces, end) for end in ends]
        for number, index, tokens, top in self._reads:
            node, offset = self.node_at(number, index)
            read = node.reads.setdefault(offset, _Read())
            read.top = max(read.top, top)
            for token in tokens:
                read.columns.setdefault(int(token), len(read.columns))
        for number, top in self._scored:
            for node in self._paths[number][1]:
                node.is_scored, node.scored_top = True, max(node.scored_top, top)
        for number, vector in self._vectors:
            self._paths[number][1][-1].vector = vector
        return Request(request_id, tuple(_token_piece(trie, pieces, node) for node in nodes), salt)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return len(self._sequences[sequence])

    def nodes(self, sequence: int) -> list[_PieceDraft]:
        """Return the pieces of a sequence, from the first. Call `request` before."""
        return self._paths[sequence][1]

    def node_at(self, sequence: int, index: int) -> tuple[_PieceDraft, int]:
        """Return the piece that holds token `index` of a sequence, and the offset of the token in it."""
        starts, pieces = self._paths[sequence]
        piece = bisect.bisect_right(starts, index) - 1
        return pieces[piece], index - starts[piece]


class TreeAnswer:
    """The answer to the request of a tree, addressed by the tree's sequences and positions."""

    def __init__(self, tree: RequestTree, answer: Answer) -> None:
        self.tree = tree
        self.answer = answer

    def log_probabilities(self, sequence: int, index: int, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `tokens` after token `index`. Raise CheckpointError if one is NaN."""
        read, columns = self._read(sequence, index)
        values = read.log_probabilities[[columns[int(token)] for token in tokens]]
        log_probabilities: list[float] = _checked(values).tolist()
        return log_probabilities

    def top(self, sequence: int, index: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens after token `index` with their log-probabilities, best first."""
        read, _ = self._read(sequence, index)
        values = _checked(read.top_log_probabilities[:count]).tolist()
        return list(zip(read.top_tokens[:count].tolist(), values, strict=True))

    def scored(self, sequence: int) -> ScoredTokens:
        """Return the scores of the sequence's own tokens. Raise CheckpointError if one is NaN."""
        pieces = [self.answer.pieces[node.number].scored for node in self.tree.nodes(sequence)]
        scored = [piece for piece in pieces if piece is not None]
        top = min(piece.top_tokens.shape[1] for piece in scored)
        log_probabilities = np.concatenate([piece.log_probabilities for piece in scored])
        _checked(log_probabilities[1:])
        return ScoredTokens(
            log_probabilities,
            np.concatenate([piece.top_tokens[:, :top] for piece in scored]),
            np.concatenate([piece.top_log_probabilities[:, :top] for piece in scored]),
        )

    def vector(self, sequence: int) -> Floats:
        """Return the vector of the sequence. Raise CheckpointError if it contains NaN."""
        vector = self.answer.pieces[self.tree.nodes(sequence)[-1].number].vector
        assert vector is not None, "the request must ask for the vector"
        return _checked(vector)

    def _read(self, sequence: int, index: int) -> tuple[ReadAnswer, dict[int, int]]:
        node, offset = self.tree.node_at(sequence, index)
        read = node.reads[offset]
        return self.answer.pieces[node.number].reads[read.index], read.columns


def _path(trie: TokenTrie, pieces: Mapping[int, _PieceDraft], node: int) -> tuple[list[int], list[_PieceDraft]]:
    """Return the start offsets and the pieces of the sequence that ends with `node`."""
    nodes: list[int] = []
    while node in pieces:
        nodes.append(node)
        node = trie.parents[node]
    nodes.reverse()
    return [trie.depths[node] for node in nodes], [pieces[node] for node in nodes]


def _token_piece(trie: TokenTrie, pieces: Mapping[int, _PieceDraft], node: int) -> TokenPiece:
    piece = pieces[node]
    parent = pieces.get(trie.parents[node])
    reads: list[TokenRead] = []
    for index, read in sorted(piece.reads.items()):
        read.index = len(reads)
        reads.append(TokenRead(index, np.array(list(read.columns), np.int32), read.top))
    return TokenPiece(
        -1 if parent is None else parent.number,
        trie.node_tokens(node),
        tuple(reads),
        piece.is_scored,
        piece.scored_top,
        piece.vector,
    )


def _checked(values: Floats) -> Floats:
    if np.isnan(values).any():
        raise CheckpointError(NO_NUMBERS, name="output")
    return values
