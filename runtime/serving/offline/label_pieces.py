"""One set of labels behind many prompts: the pieces that ask for them are made once, and scores are read as a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.questions.labels import LabelTokens
from moepass.runtime.serving.questions.request_tree import RequestTree
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Tokens

# A first piece, behind which those of the labels hang: the prompt.
_PROMPT = 0


class LabelPieces:
    """What asks for `labels` behind a prompt: the first token of each, and pieces for those of several tokens.

    longest     tokens that the longest label adds to a sequence: all but its last
    count       tokens that all labels add to a step
    """

    def __init__(self, labels: Sequence[LabelTokens]) -> None:
        self.labels = tuple(labels)
        self.longest = max(len(label) for label in labels) - 1
        firsts = sorted({label[0] for label in labels})
        self._first_tokens = np.array(firsts, np.int32)
        self._first_columns = np.array([firsts.index(label[0]) for label in labels], np.int64)
        tree = RequestTree(self.longest)
        asked = []
        for number, label in enumerate(labels):
            if len(label) > 1:
                sequence = tree.add(label[:-1])
                asked += [(number, sequence, place, token) for place, token in enumerate(label[1:])]
        for _, sequence, place, token in asked:
            tree.read(sequence, place, [token])
        self._pieces: tuple[TokenPiece, ...] = ()
        # (piece, read) of a request: the columns that are read there, and the labels that they belong to.
        self._others: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        if asked:
            behind = tree.request("labels").pieces
            self._pieces = tuple(TokenPiece(piece.parent + 1, piece.tokens, piece.reads) for piece in behind)
        self.count = sum(len(piece.tokens) for piece in self._pieces)
        for number, sequence, place, token in asked:
            node, offset = tree.node_at(sequence, place)
            read = node.reads[offset]
            columns, numbers = self._others.setdefault((node.number + 1, read.index), ([], []))
            columns.append(read.columns[token])
            numbers.append(number)

    def request(self, request_id: str, prompt: Tokens) -> Request:
        first = TokenPiece(-1, prompt, (TokenRead(len(prompt) - 1, self._first_tokens),))
        return Request(request_id, (first, *self._pieces))

    def log_probabilities(self, answers: Sequence[Answer]) -> npt.NDArray[np.float64]:
        """[answers, labels] the log-probability of each label, from the answers to such requests."""
        found = np.array([answer.pieces[_PROMPT].reads[0].log_probabilities for answer in answers], np.float64)
        found = found.reshape(len(answers), -1)[:, self._first_columns]
        for (piece, read), (columns, numbers) in self._others.items():
            added = np.array([answer.pieces[piece].reads[read].log_probabilities for answer in answers], np.float64)
            # One label may be read at one place once only, so no number stands twice.
            found[:, numbers] += added[:, columns]
        return found
