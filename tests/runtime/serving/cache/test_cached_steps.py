"""Consecutive steps through a cache that is too small: answers are right no matter which blocks it evicts.

The model computes a number for each token that depends on its complete sequence, and the memory of the cache stores
which sequence each slot was written from. So a wrong block, position or score shows as a wrong number.
"""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.sizes.architecture import Architecture, Attention, Layer
from moepass.runtime.serving.batching.block_hashes import request_hashes
from moepass.runtime.serving.batching.pack import PackedStep, pack
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex
from moepass.runtime.serving.requests.answer import ScoredTokens
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.naive_packing import KEY, full_path, piece_depth, requests_to_pack, stream_sequences

TABLE = FlopsTable(Architecture("test", "test", 8, 50, "fp32", (Layer(Attention("full", 2, 1, 4, 4), None, 16),)))

Memory = dict[int, tuple[int, ...]]


def score_of(sequence: tuple[int, ...]) -> int:
    """Return the model's score of the last token of `sequence`."""
    return zlib.crc32(np.array(sequence, np.int64).tobytes()) % 100_000


def step_scores(packed: PackedStep, sequences: list[tuple[int, ...]]) -> ScoredTokens:
    """Return the scores that the step computes: the score of the next token at each predicting output."""
    sources = packed.scores
    scores = np.array(
        [
            score_of((*sequences[position], token)) if position >= 0 else -1
            for position, token in zip(sources.predicted_at.tolist(), sources.tokens.tolist(), strict=True)
        ],
        np.int64,
    )
    floats = scores.astype(np.float32)
    return ScoredTokens(floats, scores.astype(np.int32)[:, None], floats[:, None])


def run_step(index: BlockIndex, memory: Memory, requests: list[Request], fails: bool) -> None:
    with index.lease() as lease:
        packed = pack(requests, TABLE, [lease.match(request_hashes(request, KEY)) for request in requests])
        blocks = lease.reserve(packed.offered)
        batch = packed.storing(blocks)
        sequences = stream_sequences(packed, memory)
        for stored in batch.stored:
            assert all(stored.block not in chain for chain in batch.contexts)
            memory[stored.block] = sequences[stored.positions[-1]]
        if fails:
            return
        for request, placement in zip(requests, packed.placements, strict=True):
            for piece in range(len(request.pieces)):
                path, depth = full_path(request, piece), piece_depth(request, piece)
                for offset, position in enumerate(placement.positions(piece).tolist()):
                    assert position < 0 or sequences[position] == path[: depth + offset + 1]
        computed = step_scores(packed, sequences)
        scores = packed.scores
        for at, (request_number, piece) in enumerate(scores.pieces):
            path = full_path(requests[request_number], piece)
            depth = piece_depth(requests[request_number], piece)
            for offset in range(int(scores.starts[at + 1] - scores.starts[at])):
                token = int(scores.starts[at]) + offset
                if depth + offset == 0:
                    continue
                if scores.score_slots[token] >= 0:
                    (score,) = index.scores.read(scores.score_slots[token : token + 1]).top_tokens[0].tolist()
                else:
                    score = int(computed.top_tokens[token, 0])
                assert score == score_of(path[: depth + offset + 1])
        index.scores.write(packed.written_slots(blocks), computed)
        lease.commit()


@settings(max_examples=60)
@given(
    st.integers(1, 12), st.lists(st.tuples(requests_to_pack(most_requests=3), st.booleans()), min_size=2, max_size=6)
)
def test_steps_through_the_cache_see_their_own_sequences(
    block_count: int, steps: list[tuple[list[Request], bool]]
) -> None:
    index, memory = BlockIndex(block_count), Memory()
    for requests, fails in steps:
        run_step(index, memory, requests, fails)
        # The same requests match the blocks that the previous step has stored.
        run_step(index, memory, requests, fails=False)
    index.evict(block_count)
    assert len(index) == 0
