"""A request in parts: every piece is answered once, after the same tokens as in the complete request."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepass.runtime.serving.requests.answer import Answer, PieceAnswer, Usage
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from moepass.runtime.serving.requests.request_parts import (
    halves,
    merged_answer,
    prompt_and_branches,
    request_part,
)
from tests.helpers.serving.piece_paths import piece_path


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Piece n consists of token n, so that tokens identify paths, and has a read."""
    pieces = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(-1, number - 1))
        read = TokenRead(0, np.array([number], np.int32))
        pieces.append(TokenPiece(parent, np.full(1 + number % 3, number, np.int32), (read,)))
    return Request("whole", tuple(pieces), b"salt")


def path_tokens(request: Request, number: int) -> list[int]:
    return [int(token) for piece in piece_path(request, number) for token in request.pieces[piece].tokens]


def answered(request: Request) -> Answer:
    """Return an answer whose vectors are the tokens of each read piece's path."""
    pieces = tuple(
        PieceAnswer(vector=np.array(path_tokens(request, number), np.float32)) if piece.reads else PieceAnswer()
        for number, piece in enumerate(request.pieces)
    )
    return Answer(request.id, pieces, Usage(1, 1, 10))


@given(request=requests())
def test_halves_make_the_whole(request: Request) -> None:
    split = halves(request)
    prompt, branches = prompt_and_branches(request)
    if split is None:
        roots = [piece for piece in request.pieces[prompt:] if piece.parent < prompt]
        assert len(roots) == len(branches) < 2
        return
    assert not split[0].answered & split[1].answered
    assert split[0].answered | split[1].answered == set(range(len(request.pieces)))
    parts = [(half, answered(half.of(request, "half"))) for half in split]
    merged = merged_answer(request, parts)
    assert merged.id == "whole"
    for number, piece in enumerate(merged.pieces):
        assert piece.vector is not None
        assert piece.vector.tolist() == path_tokens(request, number)
    assert merged.usage == Usage(sum(len(piece.tokens) for piece in request.pieces), 1, 20)


@given(request=requests())
def test_the_prompt_is_the_chain_that_all_others_hang_on(request: Request) -> None:
    prompt, branches = prompt_and_branches(request)
    assert sorted(itertools.chain(*branches)) == list(range(prompt, len(request.pieces)))
    assert [piece.parent for piece in request.pieces[:prompt]] == list(range(-1, prompt - 1))
    for number in range(prompt, len(request.pieces)):
        assert piece_path(request, number)[:prompt] == tuple(range(prompt))
    children = [piece.parent for piece in request.pieces].count(prompt - 1)
    assert children != 1


def test_parts_keep_the_salt_and_read_the_prompt_once() -> None:
    read = (TokenRead(0, np.array([1], np.int32)),)
    tokens = np.array([1], np.int32)
    request = Request("r", tuple(TokenPiece(min(number - 1, 0), tokens, read) for number in range(4)), b"salt")
    first = request_part(1, [3, 1], answers_prompt=True)
    second = request_part(1, [2], answers_prompt=False)
    assert first.pieces == (0, 1, 3)
    assert [len(piece.reads) for piece in first.of(request, "a").pieces] == [1, 1, 1]
    assert [len(piece.reads) for piece in second.of(request, "b").pieces] == [0, 1]
    assert second.of(request, "b").salt == b"salt"
    with pytest.raises(KeyError, match="2"):
        merged_answer(request, [(first, answered(first.of(request, "a")))])
