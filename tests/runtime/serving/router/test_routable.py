"""Requests of token pieces as the router sees them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moepass.runtime.serving.requests.request import Request, TokenPiece, Tokens
from moepass.runtime.serving.router.routable import RoutablePart, questions_of, routable_request
from tests.helpers.serving.router_oracle import LinearAndPairs


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
    ("tree", "prompt_pieces", "prompt_tokens", "blocks", "parts"),
    [
        # A single piece: its last token is always computed.
        ([(-1, 32)], 1, 32, 1, []),
        ([(-1, 33)], 1, 33, 2, []),
        # A chain of pieces is a prompt without parts.
        ([(-1, 20), (0, 12)], 2, 32, 1, []),
        # A prompt in two pieces, and two questions, one with two labels.
        (
            [(-1, 20), (0, 12), (1, 5), (1, 6), (2, 1), (2, 2)],
            2,
            32,
            2,
            [RoutablePart(-1, 5), RoutablePart(-1, 6), RoutablePart(0, 1), RoutablePart(0, 2)],
        ),
        # Pieces without a common prefix.
        ([(-1, 20), (-1, 30), (0, 4)], 0, 0, 0, [RoutablePart(-1, 20), RoutablePart(-1, 30), RoutablePart(0, 4)]),
    ],
)
def test_the_chain_that_all_hang_on_is_the_prompt(
    tree: list[tuple[int, int]], prompt_pieces: int, prompt_tokens: int, blocks: int, parts: list[RoutablePart]
) -> None:
    request = Request("a", pieces(*tree), salt=b"s")
    routable, count = routable_request(request, hashes, priority=2, deadline=9.0, arrived=1.0)
    assert (routable.id, routable.priority, routable.deadline, routable.arrived) == ("a", 2, 9.0, 1.0)
    assert (count, routable.prompt_tokens, routable.parts) == (prompt_pieces, prompt_tokens, tuple(parts))
    assert routable.blocks == (b"s\x00", b"s\x10")[:blocks]


def test_ranks_that_share_no_prefixes_compute_every_sequence_whole() -> None:
    formula = LinearAndPairs(per_token=1, per_pair=10)
    tree = pieces((-1, 20), (0, 5), (0, 6), (1, 1), (1, 2))
    request, prompt = routable_request(Request("a", tree), hashes, shares_prefixes=False)
    assert (prompt, request.prompt_tokens, request.blocks) == (1, 0, ())
    assert [(question.parts, question.flops) for question in questions_of(request, formula)] == [
        ((0, 2, 3), formula.flops(0, 26) + formula.flops(0, 27)),
        ((1,), formula.flops(0, 26)),
    ]
    chain, prompt = routable_request(Request("a", tree[:1]), hashes, shares_prefixes=False)
    assert (prompt, chain.prompt_tokens, chain.blocks, chain.parts) == (1, 20, (), ())
    forest = Request("a", pieces((-1, 20), (-1, 30), (0, 4)))
    request, prompt = routable_request(forest, hashes, shares_prefixes=False)
    assert prompt == 0
    assert [question.flops for question in questions_of(request, formula)] == [
        formula.flops(0, 24),
        formula.flops(0, 30),
    ]


def test_questions_cost_what_their_parts_cost_behind_what_they_hang_on() -> None:
    formula = LinearAndPairs(per_token=1, per_pair=10)
    request, _ = routable_request(Request("a", pieces((-1, 20), (0, 5), (0, 6), (1, 1), (1, 2))), hashes)
    first, second = questions_of(request, formula)
    assert (first.parts, second.parts) == ((0, 2, 3), (1,))
    assert first.flops == formula.flops(20, 5) + formula.flops(25, 1) + formula.flops(25, 2)
    assert second.flops == formula.flops(20, 6)
