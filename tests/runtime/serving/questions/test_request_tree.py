"""A request contains each shared prefix once, and its answer is looked up by sequence and position."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.models.errors import CheckpointError, InputError
from moepass.runtime.serving.questions.request_tree import RequestTree, TreeAnswer
from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, ReadAnswer, Usage
from moepass.runtime.serving.requests.backend import SequenceTooLongError
from moepass.runtime.serving.requests.request import Request
from tests.helpers.graphs.error_fields import refused
from tests.helpers.serving.byte_checkpoint import byte_model
from tests.helpers.serving.piece_paths import piece_path
from tests.helpers.serving.plain_scores import next_token_table
from tests.helpers.serving.reference_backend import ReferenceBackend

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=10)


def _prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(sequence[:length]) for sequence in sequences for length in range(1, len(sequence) + 1)}


@given(SEQUENCES)
def test_a_request_contains_every_distinct_prefix_once(sequences: list[list[int]]) -> None:
    tree = RequestTree(100)
    for sequence in sequences:
        tree.add(sequence)
    request = tree.request("r")
    assert sum(len(piece.tokens) for piece in request.pieces) == len(_prefixes(sequences))
    assert {_path_tokens(request, number) for number in range(len(request.pieces))} <= _prefixes(sequences)
    ends = {_path_tokens(request, number) for number in range(len(request.pieces))}
    assert {tuple(sequence) for sequence in sequences} <= ends


@given(SEQUENCES, st.data())
def test_answers_are_looked_up_by_sequence_and_position(sequences: list[list[int]], data: st.DataObject) -> None:
    tree = RequestTree(100)
    asked = []
    for sequence in sequences:
        number = tree.add(sequence)
        for position in data.draw(st.lists(st.integers(0, len(sequence) - 1), max_size=3)):
            tokens = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
            tree.read(number, position, tokens)
            asked.append((number, position, tokens))
    request = tree.request("r")
    answer = TreeAnswer(tree, _fingerprints(request))
    for number, position, tokens in asked:
        expected = [_fingerprint(tuple(sequences[number][: position + 1]), token) for token in tokens]
        assert answer.log_probabilities(number, position, tokens) == expected


def _path_tokens(request: Request, number: int) -> tuple[int, ...]:
    return tuple(np.concatenate([request.pieces[piece].tokens for piece in piece_path(request, number)]).tolist())


def _fingerprint(prefix: tuple[int, ...], token: int) -> float:
    return float(np.float32(hash((prefix, token)) % 9973))


def _fingerprints(request: Request) -> Answer:
    """Return an answer in which every number identifies its prefix and token."""
    pieces = []
    for number, piece in enumerate(request.pieces):
        path = _path_tokens(request, number)
        before = len(path) - len(piece.tokens)
        reads = [
            ReadAnswer(
                np.array(
                    [_fingerprint(path[: before + read.index + 1], token) for token in read.tokens.tolist()], "f4"
                ),
                np.empty(0, np.int32),
                np.empty(0, np.float32),
            )
            for read in piece.reads
        ]
        pieces.append(PieceAnswer(tuple(reads)))
    return Answer(request.id, tuple(pieces), Usage(0, 0, 0))


def test_scored_sequences_and_vectors_are_those_of_the_sequence_alone() -> None:
    model = byte_model()
    backend = ReferenceBackend(model)
    sequences = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7]]
    tree = RequestTree(100)
    for sequence in sequences:
        number = tree.add(sequence)
        tree.score(number, top=2)
        tree.vector(number, "last")
    answer = TreeAnswer(tree, asyncio.run(backend.answer(tree.request("r"), timeout_seconds=9)))
    for number, sequence in enumerate(sequences):
        table = next_token_table(model, sequence)
        scored = answer.scored(number)
        assert np.isnan(scored.log_probabilities[0])
        expected = [float(table[position, token]) for position, token in enumerate(sequence[1:])]
        assert scored.log_probabilities[1:].tolist() == pytest.approx(expected, abs=1e-5)
        assert scored.top_tokens[1:, 0].tolist() == table.argmax(-1)[:-1].tolist()
        single_tree = RequestTree(100)
        single_tree.vector(single_tree.add(sequence), "last")
        single_answer = TreeAnswer(
            single_tree, asyncio.run(backend.answer(single_tree.request("a"), timeout_seconds=9))
        )
        assert answer.vector(number).tolist() == pytest.approx(single_answer.vector(0).tolist(), abs=1e-5)


def test_a_sequence_without_tokens_and_one_too_long_are_refused() -> None:
    tree = RequestTree(3)
    with refused(InputError, name="the text", value=0):
        tree.add([], "the text")
    with refused(SequenceTooLongError, value=4, expected=3):
        tree.add([1, 2, 3, 4])


def test_nan_outputs_are_an_error() -> None:
    tree = RequestTree(9)
    tree.read(tree.add([1]), 0, [4])
    tree.request("r")
    nothing = np.empty(0, np.int32)
    read = ReadAnswer(np.array([np.nan], np.float32), nothing, np.empty(0, np.float32))
    answer = TreeAnswer(tree, Answer("r", (PieceAnswer((read,)),), Usage(1, 0, 0)))
    with pytest.raises(CheckpointError, match="outputs are NaN"):
        answer.log_probabilities(0, 0, [4])
