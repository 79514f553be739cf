"""The rules of a packed step, each in a small example."""

from __future__ import annotations

import numpy as np
import pytest

from moepass.models.sizes.architecture import Architecture, Attention, Layer
from moepass.runtime.serving.batching.block_hashes import MatchedBlocks, request_hashes
from moepass.runtime.serving.batching.pack import pack
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable, unshared_flops
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead, Vector
from tests.helpers.serving.naive_packing import KEY, NaiveCache, full_path

TABLE = FlopsTable(Architecture("test", "test", 8, 50, "fp32", (Layer(Attention("full", 2, 1, 4, 4), None, 16),)))


def test_unshared_flops_compute_each_branch_from_its_beginning() -> None:
    request = question_request(labels=3)
    question = len(full_path(request, 1))
    read = TABLE.read_flops + TABLE.logit_flops
    # A label of two tokens needs the logits of its first token and of the question's last one, counted once per piece.
    expected = 3 * TABLE.total(question + 1) + 6 * read
    assert unshared_flops([request], TABLE) == expected
    shared = pack([request], TABLE)
    assert shared.flops == TABLE.total(question) + 3 * TABLE.flops(question, 1) + 4 * read


def question_request(labels: int = 2, salt: bytes = b"", name: str = "a") -> Request:
    prompt = TokenPiece(-1, np.arange(40, dtype=np.int32))
    question = TokenPiece(0, np.arange(40, 50, dtype=np.int32))
    return Request(
        name,
        (
            prompt,
            question,
            *(TokenPiece(1, np.array([label, 7], np.int32), is_scored=True) for label in range(labels)),
        ),
        salt=salt,
    )


def test_the_last_token_of_a_scored_label_is_not_computed() -> None:
    packed = pack([question_request(labels=2)], TABLE)
    assert packed.batch.count == 52
    assert packed.placements[0].positions(2).tolist() == [50, -1]


def test_equal_requests_cost_once_and_tenants_share_nothing() -> None:
    same = pack([question_request(name="a"), question_request(name="b")], TABLE)
    assert same.batch.count == 52
    assert [placement.usage.flops > 0 for placement in same.placements] == [True, False]
    apart = pack([question_request(salt=b"a"), question_request(salt=b"b")], TABLE)
    assert apart.batch.count == 104
    assert apart.flops == 2 * same.flops


def test_a_read_inside_cached_blocks_computes_its_own_block_alone() -> None:
    tokens = np.arange(160, dtype=np.int32)
    reads = tuple(TokenRead(index, np.array([1], np.int32)) for index in (20, 159))
    request = Request("a", (TokenPiece(-1, tokens, reads),))
    hashes = request_hashes(request, KEY)
    matched = MatchedBlocks(hashes, np.arange(10), np.zeros((10, BLOCK_TOKENS), bool))
    packed = pack([request], TABLE, [matched])
    assert packed.batch.depth.tolist() == [*range(16, 21), *range(144, 160)]
    assert packed.batch.contexts == ((0,), tuple(range(9)))
    assert [node.context for node in packed.batch.nodes] == [0, 1]
    assert packed.placements[0].usage.cached_tokens == 160 - 21


def test_reads_on_both_sides_of_a_border_are_one_node() -> None:
    tokens = np.arange(64, dtype=np.int32)
    reads = tuple(TokenRead(index, np.array([1], np.int32)) for index in (47, 50))
    request = Request("a", (TokenPiece(-1, tokens, reads),))
    matched = MatchedBlocks(request_hashes(request, KEY), np.arange(4), np.zeros((4, BLOCK_TOKENS), bool))
    packed = pack([request], TABLE, [matched])
    assert packed.batch.depth.tolist() == list(range(32, 51))
    assert len(packed.batch.nodes) == 1
    assert packed.batch.contexts == ((0, 1),)


def test_branches_behind_equal_cached_blocks_share_a_context() -> None:
    prompt = TokenPiece(-1, np.arange(32, dtype=np.int32))
    read = (TokenRead(0, np.array([1], np.int32)),)
    request = Request("a", (prompt, *(TokenPiece(0, np.array([number], np.int32), read) for number in range(5))))
    matched = MatchedBlocks(request_hashes(request, KEY), np.array([4, 3]), np.zeros((2, BLOCK_TOKENS), bool))
    packed = pack([request], TABLE, [matched])
    assert packed.batch.contexts == ((4, 3),)
    assert [node.context for node in packed.batch.nodes] == [0] * 5
    assert packed.batch.tokens.tolist() == list(range(5))


@pytest.mark.parametrize(("vector", "computed"), [("last", 16), ("mean", 32)])
def test_a_vector_needs_its_last_token_or_all(vector: Vector, computed: int) -> None:
    request = Request("a", (TokenPiece(-1, np.arange(32, dtype=np.int32), vector=vector),))
    matched = MatchedBlocks(request_hashes(request, KEY), np.array([0, 1]), np.zeros((2, BLOCK_TOKENS), bool))
    packed = pack([request], TABLE, [matched])
    assert packed.batch.count == computed
    assert packed.batch.output_positions.tolist() == ([15] if vector == "last" else list(range(32)))
    assert not len(packed.logit_places)


def test_what_the_cache_knows_needs_no_step() -> None:
    request = Request("a", (TokenPiece(-1, np.arange(32, dtype=np.int32), is_scored=True),))
    matched = MatchedBlocks(request_hashes(request, KEY), np.array([5, 2]), np.ones((2, BLOCK_TOKENS), bool))
    packed = pack([request], TABLE, [matched])
    assert (packed.batch.count, packed.flops) == (0, 0)
    assert packed.batch.nodes == ()
    assert packed.placements[0].usage.cached_tokens == 32
    assert packed.scores.score_slots.tolist() == [-1, *range(81, 96), *range(32, 48)]


def test_a_step_of_no_requests_is_empty() -> None:
    packed = pack([], TABLE, [])
    assert (packed.batch.count, packed.flops, packed.placements) == (0, 0, ())


def test_stored_blocks_are_those_that_the_cache_took() -> None:
    request = question_request()
    packed = pack([request], TABLE, [NaiveCache().match(request)])
    assert len(packed.offered.hashes) == 3
    (stored,) = packed.storing(np.array([-1, 9, -1])).stored
    assert stored.block == 9
    assert stored.positions.tolist() == list(range(16, 32))


def test_what_does_not_fit_the_requests_is_refused() -> None:
    request = question_request()
    with pytest.raises(ValueError, match="zip"):
        pack([request], TABLE, [])
    wrong_match = NaiveCache().match(Request("b", (TokenPiece(-1, np.arange(16, dtype=np.int32)),) * 4))
    with pytest.raises(AssertionError):
        pack([request], TABLE, [wrong_match])
