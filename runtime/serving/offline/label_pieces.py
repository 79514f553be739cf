"""One set of labels behind many prompts: its pieces are made once, and scores are read as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.questions.labels import LabelTokens
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Tokens

# The first piece of a request is the prompt; the pieces of the labels follow it.
_PROMPT = 0


class LabelPieces:
    """The reads and pieces that ask for `labels` behind any prompt.

    Attributes:
        labels: The tokens of each label.
        longest: Tokens that the longest label adds to a sequence: all but its last one.
        count: Tokens that all labels together add to a step.
    """

    def __init__(self, labels: Sequence[LabelTokens]) -> None:
        self.labels = tuple(labels)
        self.longest = max(len(label) for label in labels) - 1
        firsts = sorted({label[0] for label in labels})
        self._first_tokens = np.array(firsts, np.int32)
        self._first_columns = np.array([firsts.index(label[0]) for label in labels], np.int64)
        tree = RequestTree(self.longest)
        reads = []
        for number, label in enumerate(labels):
            if len(label) > 1:
                sequence = tree.add(label[:-1])
                reads += [(number, sequence, position, token) for position, token in enumerate(label[1:])]
        for _, sequence, position, token in reads:
            tree.read(sequence, position, [token])
        self._pieces: tuple[TokenPiece, ...] = ()
        # By (piece, read) of a request: the columns of the read, and the labels to which they belong.
        self._later_tokens: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        if reads:
            pieces = tree.request("labels").pieces
            self._pieces = tuple(TokenPiece(piece.parent + 1, piece.tokens, piece.reads) for piece in pieces)
        self.count = sum(len(piece.tokens) for piece in self._pieces)
        for number, sequence, position, token in reads:
            node, offset = tree.node_at(sequence, position)
            read = node.reads[offset]
            columns, numbers = self._later_tokens.setdefault((node.number + 1, read.index), ([], []))
            columns.append(read.columns[token])
            numbers.append(number)

    def request(self, request_id: str, prompt: Tokens) -> Request:
        """Return the request for all labels behind `prompt`."""
        first = TokenPiece(-1, prompt, (TokenRead(len(prompt) - 1, self._first_tokens),))
        return Request(request_id, (first, *self._pieces))

    def log_probabilities(self, answers: Sequence[Answer]) -> npt.NDArray[np.float64]:
        """Return the log-probability of each label, [answers, labels], from the answers to such requests."""
        firsts = np.array([answer.pieces[_PROMPT].reads[0].log_probabilities for answer in answers], np.float64)
        sums = firsts.reshape(len(answers), -1)[:, self._first_columns]
        for (piece, read), (columns, numbers) in self._later_tokens.items():
            values = np.array([answer.pieces[piece].reads[read].log_probabilities for answer in answers], np.float64)
            # A read has at most one column per label, so `numbers` has no duplicates.
            sums[:, numbers] += values[:, columns]
        return sums
