"""Hashes that name cache blocks, and records of such blocks between the packer and the cache.

A hash covers a block and all tokens before it, so equal hashes mean equal prefixes.

    start    = blake2b(salt), personalised, so that no salt has the hash of a block
    hash[0]  = blake2b(start + tokens[0:16])
    hash[i]  = blake2b(hash[i - 1] + tokens[16 i : 16 i + 16])

All hashes are keyed (RFC 7693, section 2.9). Every server process draws its own key, so an outsider can neither find
colliding prompts nor compute the hash of a block. With 16 bytes, two of 2^40 prefixes collide with a probability of
2^-49. Only complete blocks have a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices
from moepass.runtime.serving.requests.request import Request, Tokens

HASH_BYTES = 16
KEY_BYTES = range(16, hashlib.blake2b.MAX_KEY_SIZE + 1)

_TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestHashes:
    """The hashes of all blocks of a request. A block that several sequences share is listed once.

    Attributes:
        hashes: the blocks whose last token is in piece 0, then those that end in piece 1, and so on.
        starts: [pieces + 1] index of the first block of each piece.
        previous: [hashes] index of the block before each block, -1 for the first block of a sequence.
    """

    hashes: tuple[bytes, ...]
    starts: Indices
    previous: Indices


NO_HASHES = RequestHashes((), NO_INDICES, NO_INDICES)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MatchedBlocks:
    """The cached blocks of a request, `blocks` [hashes] with -1 for none.

    `scores_known` [hashes, BLOCK_TOKENS] says whether the cache stores log-probability and most likely token of each
    token.
    """

    hashes: RequestHashes
    blocks: Indices
    scores_known: npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OfferedBlocks:
    """Blocks that a step computes and the cache does not hold, in an order with each block before its successors.

    Attributes:
        previous: hashes of the blocks before them, None for the first block of a sequence.
        requests: [blocks] number of requests of the step with each block.
        branches: [blocks] number of branches of the step's trie below each block.
        positions: [blocks, BLOCK_TOKENS] indices of their tokens in the stream.
    """

    hashes: tuple[bytes, ...]
    previous: tuple[bytes | None, ...]
    requests: Indices
    branches: Indices
    positions: Indices


def path_hashes(tokens: Tokens, key: bytes, salt: bytes = b"") -> list[bytes]:
    """Return the hashes of the complete blocks of one sequence. Raises InputError if the key is too short or long."""
    keyed, first = _keyed(key, salt)
    return _chain(keyed, first, _bytes(tokens))


def request_hashes(request: Request, key: bytes) -> RequestHashes:
    """Return the hashes of the blocks of `request`. Raises InputError if the key is too short or too long."""
    keyed, first = _keyed(key, request.salt)
    hashes: list[bytes] = []
    previous: list[int] = []
    starts = [0]
    # For each piece, the last complete block of its sequence, and the bytes of the tokens after that block.
    last_blocks: list[int] = []
    remainders: list[bytes] = []
    for piece in request.pieces:
        last_block, unhashed = -1, b""
        if piece.parent >= 0:
            last_block, unhashed = last_blocks[piece.parent], remainders[piece.parent]
        unhashed = unhashed + _bytes(piece.tokens)
        if len(unhashed) >= _BLOCK_BYTES:
            new_hashes = _chain(keyed, hashes[last_block] if last_block >= 0 else first, unhashed)
            previous += [last_block, *range(len(hashes), len(hashes) + len(new_hashes) - 1)]
            hashes += new_hashes
            last_block = len(hashes) - 1
            unhashed = unhashed[len(new_hashes) * _BLOCK_BYTES :]
        starts.append(len(hashes))
        last_blocks.append(last_block)
        remainders.append(unhashed)
    return RequestHashes(tuple(hashes), np.array(starts, np.int64), np.array(previous, np.int64))


def _keyed(key: bytes, salt: bytes) -> tuple[hashlib.blake2b, bytes]:
    """Return a hasher that has read the key, and the start of a chain of hashes."""
    if len(key) not in KEY_BYTES:
        text = f"the key of the cache has {len(key)} bytes; a key has {KEY_BYTES[0]} to {KEY_BYTES[-1]} bytes"
        raise InputError(text, name="key", value=len(key), expected=KEY_BYTES)
    first = hashlib.blake2b(salt, key=key, digest_size=HASH_BYTES, person=b"salt").digest()
    return hashlib.blake2b(key=key, digest_size=HASH_BYTES), first


def _chain(keyed: hashlib.blake2b, previous: bytes, data: bytes) -> list[bytes]:
    hashes = []
    for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        hasher = keyed.copy()
        hasher.update(previous + data[start : start + _BLOCK_BYTES])
        previous = hasher.digest()
        hashes.append(previous)
    return hashes


def _bytes(tokens: Tokens) -> bytes:
    # Little-endian on every machine, because the ranks of one server may run on several.
    return np.asarray(tokens, "<i4").tobytes()
