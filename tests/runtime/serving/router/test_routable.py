"""Requests of token pieces as the router sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moepass.runtime.serving.requests.request import Request, TokenPiece, Tokens
from moepass.runtime.serving.router.routable import RoutableQuestion, routable_request
from tests.helpers.serving.router_oracle import questions_of


def pieces(*parents_and_lengths: tuple[int, int]) -> tuple[TokenPiece, ...]:
    start = 0
    result = []
    for parent, length in parents_and_lengths:
        result.append(TokenPiece(parent, np.arange(start, start + length, dtype=np.int32)))
        start += length
    return tuple(result)


def hashes(tokens: Tokens, salt: bytes) -> Sequence[bytes]:
    return [salt + bytes([int(tokens[start])]) for start in range(0, len(tokens), 16)]


@pytest.mark.parametrize(
    ("tree", "prompt_pieces", "prompt_tokens", "blocks"),
    [
        # A single piece: its last token is always computed.
        ([(-1, 32)], 1, 32, 1),
        ([(-1, 33)], 1, 33, 2),
        # A chain of pieces is a prompt without parts.
        ([(-1, 20), (0, 12)], 2, 32, 1),
        # A prompt in two pieces, and two questions, one with two labels.
        ([(-1, 20), (0, 12), (1, 5), (1, 6), (2, 1), (2, 2)], 2, 32, 2),
        # Pieces without a common prefix.
        ([(-1, 20), (-1, 30), (0, 4)], 0, 0, 0),
    ],
)
def test_the_chain_that_all_hang_on_is_the_prompt(
    tree: list[tuple[int, int]], prompt_pieces: int, prompt_tokens: int, blocks: int
) -> None:
    request = Request("a", pieces(*tree), salt=b"s")
    routable, count = routable_request(request, hashes, priority=2, deadline=9.0, arrived=1.0)
    assert (routable.id, routable.priority, routable.deadline, routable.arrived) == ("a", 2, 9.0, 1.0)
    assert (count, routable.prompt_tokens) == (prompt_pieces, prompt_tokens)
    parts = [(max(parent - prompt_pieces, -1), tokens) for parent, tokens in tree[prompt_pieces:]]
    assert routable.questions == questions_of(prompt_tokens, parts)
    assert routable.blocks == (b"s\x00", b"s\x10")[:blocks]


def test_ranks_that_share_no_prefixes_compute_every_sequence_whole() -> None:
    tree = pieces((-1, 20), (0, 5), (0, 6), (1, 1), (1, 2))
    request, prompt = routable_request(Request("a", tree), hashes, shares_prefixes=False)
    assert (prompt, request.prompt_tokens, request.blocks) == (1, 0, ())
    assert request.questions == (
        RoutableQuestion((0, 2, 3), ((0, 26), (0, 27))),
        RoutableQuestion((1,), ((0, 26),)),
    )
    chain, prompt = routable_request(Request("a", tree[:1]), hashes, shares_prefixes=False)
    assert (prompt, chain.prompt_tokens, chain.blocks, chain.questions) == (1, 20, (), ())
    forest = Request("a", pieces((-1, 20), (-1, 30), (0, 4)))
    request, prompt = routable_request(forest, hashes, shares_prefixes=False)
    assert prompt == 0
    assert [question.runs for question in request.questions] == [((0, 24),), ((0, 30),)]


def test_questions_compute_their_parts_behind_what_they_hang_on() -> None:
    request, _ = routable_request(Request("a", pieces((-1, 20), (0, 5), (0, 6), (1, 1), (1, 2))), hashes)
    assert request.questions == (
        RoutableQuestion((0, 2, 3), ((20, 5), (25, 1), (25, 2))),
        RoutableQuestion((1,), ((20, 6),)),
    )
