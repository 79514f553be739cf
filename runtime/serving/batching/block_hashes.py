"""Names of blocks: a hash of the tokens of a block and of all before it, so that equal names mean equal prefixes.

    start    = blake2b(salt), personalised, so that no salt gives what a block gives
    hash[0]  = blake2b(start + tokens[0:16])
    hash[i]  = blake2b(hash[i - 1] + tokens[16 i : 16 i + 16])

All are keyed (RFC 7693, section 2.9) with a key that every server process draws for itself, so nobody outside can
compute which prompts collide or what a block is called. 16 bytes: two of 2^40 prefixes are equal by chance with a
probability of 2^-49. Only complete blocks have a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, NO_INDICES, Indices
from moepass.runtime.serving.requests.request import Request, Tokens

HASH_BYTES = 16
KEY_BYTES = range(16, hashlib.blake2b.MAX_KEY_SIZE + 1)

_TOKEN_BYTES = 4
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestHashes:
    """The hashes of all blocks of a request, each named once however many pieces lie behind it.

    hashes      of the blocks whose last token is in piece 0, then of those that end in piece 1, and so on
    starts      [pieces + 1] where those of each piece begin
    previous    [hashes] for each the index of the block before it, -1 for the first one of a sequence
    """

    hashes: tuple[bytes, ...]
    starts: Indices
    previous: Indices


NO_HASHES = RequestHashes((), NO_INDICES, NO_INDICES)


def path_hashes(tokens: Tokens, key: bytes, salt: bytes = b"") -> list[bytes]:
    """The hashes of the complete blocks of one sequence. Raises InputError for a key that is too short or too long."""
    keyed, first = _keyed(key, salt)
    return _chain(keyed, first, _bytes(tokens))


def request_hashes(request: Request, key: bytes) -> RequestHashes:
    """The hashes of a request. Raises InputError for a key that is too short or too long."""
    keyed, first = _keyed(key, request.salt)
    hashes: list[bytes] = []
    previous: list[int] = []
    starts = [0]
    # Of each piece: its last complete block in its sequence, and the tokens behind that block.
    last_blocks: list[int] = []
    rests: list[bytes] = []
    for piece in request.pieces:
        last_block, rest = -1, b""
        if piece.parent >= 0:
            last_block, rest = last_blocks[piece.parent], rests[piece.parent]
        unhashed = rest + _bytes(piece.tokens)
        if len(unhashed) >= _BLOCK_BYTES:
            found = _chain(keyed, hashes[last_block] if last_block >= 0 else first, unhashed)
            previous += [last_block, *range(len(hashes), len(hashes) + len(found) - 1)]
            hashes += found
            last_block = len(hashes) - 1
            unhashed = unhashed[len(found) * _BLOCK_BYTES :]
        starts.append(len(hashes))
        last_blocks.append(last_block)
        rests.append(unhashed)
    return RequestHashes(tuple(hashes), np.array(starts, np.int64), np.array(previous, np.int64))


def _keyed(key: bytes, salt: bytes) -> tuple[hashlib.blake2b, bytes]:
    """A hasher that has read the key, and the start of a chain."""
    if len(key) not in KEY_BYTES:
        raise InputError(
            f"the key of the cache has {len(key)} bytes; it must have {KEY_BYTES[0]} to {KEY_BYTES[-1]}",
            name="key",
            value=len(key),
            expected=KEY_BYTES,
        )
    first = hashlib.blake2b(salt, key=key, digest_size=HASH_BYTES, person=b"salt").digest()
    return hashlib.blake2b(key=key, digest_size=HASH_BYTES), first


def _chain(keyed: hashlib.blake2b, before: bytes, data: bytes) -> list[bytes]:
    found = []
    for at in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        hasher = keyed.copy()
        hasher.update(before + data[at : at + _BLOCK_BYTES])
        before = hasher.digest()
        found.append(before)
    return found


def _bytes(tokens: Tokens) -> bytes:
    # Little-endian on every machine: ranks of one server may run on several.
    return np.asarray(tokens, "<i4").tobytes()
