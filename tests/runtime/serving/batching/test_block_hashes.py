"""Block hashes are equal exactly if prefixes, salts and keys are equal, and each is computed once per request."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.block_hashes import KEY_BYTES, path_hashes, request_hashes
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.requests.request import Request, TokenPiece
from tests.helpers.graphs.error_fields import refused
from tests.helpers.serving.naive_packing import KEY, full_path, piece_depth, requests_to_pack

TOKENS = np.arange(50, dtype=np.int32)


@given(requests_to_pack())
def test_a_request_has_the_hashes_of_its_sequences(requests: list[Request]) -> None:
    by_hash: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
    for request in requests:
        actual = request_hashes(request, KEY)
        assert len(actual.starts) == len(request.pieces) + 1
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            expected = path_hashes(np.array(path, np.int32), KEY, request.salt)
            assert len(expected) == len(path) // BLOCK_TOKENS
            blocks = slice(int(actual.starts[piece]), int(actual.starts[piece + 1]))
            before = piece_depth(request, piece) // BLOCK_TOKENS
            assert list(actual.hashes[blocks]) == expected[before:]
            for number, previous in zip(range(blocks.start, blocks.stop), actual.previous[blocks], strict=True):
                block = before + number - blocks.start
                assert (actual.hashes[previous] if previous >= 0 else None) == (expected[block - 1] if block else None)
                prefix = (request.salt, path[: (block + 1) * BLOCK_TOKENS])
                assert by_hash.setdefault(actual.hashes[number], prefix) == prefix
    assert len(set(by_hash.values())) == len(by_hash)


def test_the_chain_is_keyed_blake2b() -> None:
    first = hashlib.blake2b(b"tenant", key=KEY, digest_size=16, person=b"salt").digest()
    block = hashlib.blake2b(first + TOKENS[:16].astype("<i4").tobytes(), key=KEY, digest_size=16).digest()
    second = hashlib.blake2b(block + TOKENS[16:32].astype("<i4").tobytes(), key=KEY, digest_size=16).digest()
    assert path_hashes(TOKENS, KEY, b"tenant")[:2] == [block, second]


def test_other_keys_salts_and_beginnings_give_other_hashes() -> None:
    hashes = [
        path_hashes(TOKENS, KEY),
        path_hashes(TOKENS, KEY, b"a"),
        path_hashes(TOKENS, KEY[::-1]),
        path_hashes(TOKENS[::-1], KEY),
        path_hashes(np.concatenate([[1], TOKENS[1:]]), KEY),
    ]
    assert len({name for names in hashes for name in names}) == 5 * 3


def test_incomplete_blocks_have_none() -> None:
    assert path_hashes(TOKENS[:15], KEY) == []
    assert request_hashes(Request("a", (TokenPiece(-1, TOKENS[:15]),)), KEY).hashes == ()


@pytest.mark.parametrize("count", [0, 15, 65])
def test_a_key_of_another_length_is_refused(count: int) -> None:
    with refused(InputError, name="key", value=count, expected=KEY_BYTES):
        path_hashes(TOKENS, bytes(count))
