"""The expected packed step, computed sequence by sequence and token by token, and strategies for requests and caches.

A token is identified by its sequence: (salt, all tokens up to and including it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moepass.runtime.serving.batching.block_hashes import MatchedBlocks, request_hashes
from moepass.runtime.serving.batching.pack import PackedStep
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.serving.piece_paths import piece_path

KEY = bytes(range(32))

Prefix = tuple[bytes, tuple[int, ...]]


def full_path(request: Request, piece: int) -> tuple[int, ...]:
    return tuple(int(token) for number in piece_path(request, piece) for token in request.pieces[number].tokens)


def piece_depth(request: Request, piece: int) -> int:
    return len(full_path(request, piece)) - len(request.pieces[piece].tokens)


@dataclasses.dataclass
class NaiveCache:
    """Cache blocks by the sequence that they end; `known` are the tokens whose scores are cached with them."""

    blocks: dict[Prefix, int] = dataclasses.field(default_factory=dict)
    known: set[Prefix] = dataclasses.field(default_factory=set)

    def held(self, salt: bytes, path: tuple[int, ...]) -> int:
        count = 0
        while len(path) >= (count + 1) * BLOCK_TOKENS and (salt, path[: (count + 1) * BLOCK_TOKENS]) in self.blocks:
            count += 1
        return count

    def match(self, request: Request) -> MatchedBlocks:
        hashes = request_hashes(request, KEY)
        blocks = np.full(len(hashes.hashes), -1)
        is_known = np.zeros((len(hashes.hashes), BLOCK_TOKENS), bool)
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            first = piece_depth(request, piece) // BLOCK_TOKENS
            for index in range(int(hashes.starts[piece]), int(hashes.starts[piece + 1])):
                end = (first + index - int(hashes.starts[piece]) + 1) * BLOCK_TOKENS
                blocks[index] = self.blocks.get((request.salt, path[:end]), -1)
                is_known[index] = [
                    (request.salt, path[: end - 15 + offset]) in self.known for offset in range(BLOCK_TOKENS)
                ]
        return MatchedBlocks(hashes, blocks, is_known)


def cached_scores(request: Request, piece: int, cache: NaiveCache) -> set[int]:
    """Return the positions of the tokens of a scored piece whose scores come from the cache."""
    if request.pieces[piece].scored_top > 1:
        return set()
    path = full_path(request, piece)
    held = cache.held(request.salt, path) * BLOCK_TOKENS
    return {
        position
        for position in range(max(piece_depth(request, piece), 1), len(path))
        if position < held and (request.salt, path[: position + 1]) in cache.known
    }


def needed_positions(request: Request, piece: int, cache: NaiveCache) -> tuple[set[int], set[int]]:
    """Return the positions in the piece's sequence at which logits are read, and those at which vectors are read."""
    token_piece = request.pieces[piece]
    depth = piece_depth(request, piece)
    end = depth + len(token_piece.tokens)
    logits = {depth + read.index for read in token_piece.reads}
    if token_piece.is_scored:
        from_cache = cached_scores(request, piece, cache)
        logits |= {position - 1 for position in range(max(depth, 1), end) if position not in from_cache}
    vectors = {"last": {end - 1}, "mean": set(range(end)), None: set()}[token_piece.vector]
    return logits, vectors


@dataclasses.dataclass
class NaiveStep:
    logits: set[Prefix]
    places: set[Prefix]
    computed: set[Prefix]
    first_owners: dict[Prefix, int]
    first_readers: dict[Prefix, int]
    first_logit_readers: dict[Prefix, int]


def naive_step(requests: Sequence[Request], cache: NaiveCache) -> NaiveStep:
    step = NaiveStep(set(), set(), set(), {}, {}, {})
    for number, request in enumerate(requests):
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            held = cache.held(request.salt, path)
            logits, vectors = needed_positions(request, piece, cache)
            for position in logits | vectors:
                prefix = (request.salt, path[: position + 1])
                step.places.add(prefix)
                step.first_readers.setdefault(prefix, number)
                if position in logits:
                    step.logits.add(prefix)
                    step.first_logit_readers.setdefault(prefix, number)
                first = BLOCK_TOKENS * min(held, position // BLOCK_TOKENS)
                for end in range(first + 1, position + 2):
                    step.computed.add((request.salt, path[:end]))
                    step.first_owners.setdefault((request.salt, path[:end]), number)
    return step


def request_prefixes(request: Request) -> set[Prefix]:
    return {
        (request.salt, path[:end])
        for piece in range(len(request.pieces))
        for path in [full_path(request, piece)]
        for end in range(1, len(path) + 1)
    }


def visible_tokens(packed: PackedStep, q: int) -> list[int]:
    batch = packed.batch
    return [k for k in range(q + 1) if q < batch.subtree_end[k]]


def stream_sequences(packed: PackedStep, contents: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the sequence that each token of the stream sees, including itself.

    `contents` maps each cache block to the sequence that it ends.
    """
    batch = packed.batch
    contexts = np.full(batch.count, -2)
    for node in batch.nodes:
        contexts[node.start : node.end] = node.context
    sequences = []
    for q in range(batch.count):
        chain = batch.contexts[contexts[q]] if contexts[q] >= 0 else ()
        for number, block in enumerate(chain):
            assert len(contents[block]) == (number + 1) * BLOCK_TOKENS
            assert contents[block] == contents[chain[-1]][: (number + 1) * BLOCK_TOKENS]
        before = contents[chain[-1]] if chain else ()
        seen = visible_tokens(packed, q)
        assert [int(batch.depth[k]) for k in seen] == list(range(len(before), len(before) + len(seen)))
        sequences.append((*before, *(int(batch.tokens[k]) for k in seen)))
    return sequences


# Token sequences with common beginnings; a piece continues at its depth.
_RANDOM = np.random.default_rng(0)
_COMMON = _RANDOM.integers(0, 3, 160)
STORIES = [np.concatenate([_COMMON[:same], _RANDOM.integers(0, 3, 160 - same)]) for same in (160, 80, 33, 32, 5, 0)]


@st.composite
def requests_to_pack(draw: Any, most_requests: int = 4) -> list[Request]:
    """Draw requests with equal prefixes that are cut into pieces at different positions."""
    return [
        Request(str(number), tuple(_pieces(draw)), salt=draw(st.sampled_from([b"", b"", b"tenant"])))
        for number in range(draw(st.integers(1, most_requests)))
    ]


def _pieces(draw: Any) -> Iterator[TokenPiece]:
    ends: list[int] = []
    for number in range(draw(st.integers(1, 5))):
        parent = draw(st.integers(-1, number - 1))
        depth = ends[parent] if parent >= 0 else 0
        count = draw(st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 32, 33]))
        tokens = STORIES[draw(st.integers(0, len(STORIES) - 1))][depth : depth + count].astype(np.int32)
        ends.append(depth + len(tokens))
        if not len(tokens):
            tokens = np.array([1], np.int32)
            ends[-1] += 1
        places = draw(st.lists(st.integers(0, len(tokens) - 1), max_size=2))
        yield TokenPiece(
            parent,
            tokens,
            tuple(TokenRead(position, np.array([1], np.int32)) for position in places),
            is_scored=draw(st.integers(0, 3)) == 0,
            scored_top=draw(st.integers(0, 2)),
            vector=draw(st.sampled_from([None, None, None, None, "last", "mean"])),
        )


@st.composite
def caches_for(draw: Any, requests: Sequence[Request]) -> NaiveCache:
    """Draw a cache with blocks of the beginnings of some sequences, with or without their scores."""
    cache = NaiveCache()
    numbers = draw(st.permutations(range(64)))
    for request in requests:
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            for count in range(draw(st.integers(0, len(path) // BLOCK_TOKENS))):
                prefix = (request.salt, path[: (count + 1) * BLOCK_TOKENS])
                if prefix not in cache.blocks and len(cache.blocks) < len(numbers):
                    cache.blocks[prefix] = numbers[len(cache.blocks)]
                    is_known = draw(st.sampled_from([(True,), (False,), (True, False)]))
                    for end in range(count * BLOCK_TOKENS + 1, (count + 1) * BLOCK_TOKENS + 1):
                        if is_known[end % len(is_known)]:
                            cache.known.add((request.salt, path[:end]))
    # A cache frees no block behind a gap, but its answer may contain a gap.
    for prefix in draw(st.lists(st.sampled_from(sorted(cache.blocks)), max_size=1)) if cache.blocks else []:
        del cache.blocks[prefix]
    return cache
