"""A packed step against the same sequences one by one, for random trees of pieces, sharing, salts and caches."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.layers import flops_per_token, head_flops
from moepass.models.sizes.architecture import Architecture, Attention, Layer
from moepass.runtime.serving.batching.block_hashes import request_hashes
from moepass.runtime.serving.batching.pack import PackedStep, pack
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable, unshared_flops
from moepass.runtime.serving.requests.request import Request
from tests.helpers.serving.naive_packing import (
    KEY,
    NaiveCache,
    NaiveStep,
    cached_scores,
    caches_for,
    full_path,
    naive_step,
    needed_positions,
    piece_depth,
    request_prefixes,
    requests_to_pack,
    stream_sequences,
    visible_tokens,
)

LAYERS = (
    Layer(Attention("full", 2, 1, 4, 4), None, 16),
    Layer(Attention("sliding", 2, 1, 4, 4, window=7), None, 16),
    Layer(Attention("sliding", 2, 2, 4, 8, window=8), None, 16),
    Layer(Attention("chunked", 2, 1, 4, 4, window=10), None, 8),
    Layer(Attention("full", 2, 1, 4, 4), None, 16),
)
ARCHITECTURE = Architecture("test", "test", 8, 50, "fp32", LAYERS)
TABLE = FlopsTable(ARCHITECTURE)


@dataclasses.dataclass
class Case:
    requests: list[Request]
    cache: NaiveCache
    packed: PackedStep
    naive: NaiveStep
    sequences: list[tuple[int, ...]]


@st.composite
def cases(draw: Any) -> Case:
    requests = draw(requests_to_pack())
    cache = draw(caches_for(requests))
    packed = pack(requests, TABLE, [cache.match(request) for request in requests])
    contents = {block: path for (_, path), block in cache.blocks.items()}
    return Case(requests, cache, packed, naive_step(requests, cache), stream_sequences(packed, contents))


many = settings(max_examples=50)


@many
@given(cases())
def test_each_needed_token_is_computed_once_behind_its_own_sequence(case: Case) -> None:
    # `stream_sequences` checks depths, and that a token sees each earlier position once.
    assert collections.Counter(case.sequences) == collections.Counter(path for _, path in case.naive.computed)


@many
@given(cases())
def test_nodes_are_the_trie_without_single_child_chains(case: Case) -> None:
    batch = case.packed.batch
    nodes = batch.nodes
    assert [node.start for node in nodes] == [0, *(node.end for node in nodes[:-1])][: len(nodes)]
    assert (nodes[-1].end if nodes else 0) == batch.count
    for number, node in enumerate(nodes):
        assert node.start < node.end
        assert (batch.subtree_end[node.start : node.end] == node.subtree_end).all()
        visible = [k for k in visible_tokens(case.packed, node.start) if k < node.start]
        assert node.parent == (-1 if not visible else next(i for i, n in enumerate(nodes) if n.end == visible[-1] + 1))
        children = [child for child in nodes if child.parent == number]
        assert len(children) != 1
        assert node.subtree_end == (children[-1].subtree_end if children else node.end)
        if node.parent >= 0:
            assert node.context == nodes[node.parent].context
        elif node.context < 0:
            assert batch.depth[node.start] == 0
    assert len(set(batch.contexts)) == len(batch.contexts)
    assert {node.context for node in nodes} - {-1} == set(range(len(batch.contexts)))


@many
@given(cases())
def test_pieces_are_found_in_the_stream(case: Case) -> None:
    salts: dict[int, bytes] = {}
    for request, placement in zip(case.requests, case.packed.placements, strict=True):
        for piece in range(len(request.pieces)):
            path, depth = full_path(request, piece), piece_depth(request, piece)
            for index, position in enumerate(placement.positions(piece).tolist()):
                prefix = (request.salt, path[: depth + index + 1])
                assert (position >= 0) == (prefix in case.naive.computed)
                if position >= 0:
                    assert case.sequences[position] == prefix[1]
                    assert salts.setdefault(position, request.salt) == request.salt
    assert len(salts) == case.packed.batch.count
    block_salts = {block: salt for (salt, _), block in case.cache.blocks.items()}
    for node in case.packed.batch.nodes:
        if node.context >= 0:
            blocks = case.packed.batch.contexts[node.context]
            assert {block_salts[block] for block in blocks} == {salts[node.start]}


@many
@given(cases())
def test_tokens_of_scored_pieces_are_found_in_the_cache(case: Case) -> None:
    scores = case.packed.scores
    for at, (number, piece) in enumerate(scores.pieces):
        request = case.requests[number]
        path, depth = full_path(request, piece), piece_depth(request, piece)
        held = case.cache.held(request.salt, path) * BLOCK_TOKENS
        slots = scores.cache_slots[int(scores.starts[at]) : int(scores.starts[at + 1])]
        for position, slot in enumerate(slots.tolist(), depth):
            assert (slot >= 0) == (position < held)
            if slot >= 0:
                block, offset = divmod(slot, BLOCK_TOKENS)
                assert offset == position % BLOCK_TOKENS
                assert case.cache.blocks[request.salt, path[: position + BLOCK_TOKENS - offset]] == block


@many
@given(cases())
def test_each_output_is_read_where_it_stands(case: Case) -> None:
    packed = case.packed
    assert packed.batch.output_positions.tolist() == sorted(packed.batch.output_positions.tolist())
    assert packed.logit_places.tolist() == sorted(packed.logit_places.tolist())
    read = collections.Counter(case.sequences[position] for position in packed.batch.output_positions)
    assert read == collections.Counter(path for _, path in case.naive.places)
    read = collections.Counter(case.sequences[position] for position in packed.logit_places)
    assert read == collections.Counter(path for _, path in case.naive.logits)
    places, logit_places = set(packed.batch.output_positions.tolist()), set(packed.logit_places.tolist())
    expected = [
        full_path(request, number)[: piece_depth(request, number) + read.index + 1]
        for request in case.requests
        for number, piece in enumerate(request.pieces)
        for read in piece.reads
    ]
    assert [case.sequences[position] for position in packed.read_positions] == expected
    assert logit_places.issuperset(packed.read_positions.tolist())
    for request, placement in zip(case.requests, packed.placements, strict=True):
        for number in range(len(request.pieces)):
            _, vectors = needed_positions(request, number, case.cache)
            path = full_path(request, number)
            positions = placement.vector_positions(number) if request.pieces[number].vector else []
            vector_sequences = [case.sequences[position] for position in positions]
            assert vector_sequences == [path[: position + 1] for position in sorted(vectors)]
            assert places.issuperset(positions)


@pytest.mark.slow
@many
@given(cases())
def test_each_score_comes_from_the_step_or_the_cache(case: Case) -> None:
    scores, places = case.packed.scores, set(case.packed.logit_places.tolist())
    scored = [
        (number, piece)
        for number, request in enumerate(case.requests)
        for piece in range(len(request.pieces))
        if request.pieces[piece].is_scored
    ]
    assert list(scores.pieces) == scored
    for at, (number, piece) in enumerate(scored):
        request, placement = case.requests[number], case.packed.placements[number]
        path, depth = full_path(request, piece), piece_depth(request, piece)
        from_cache = cached_scores(request, piece, case.cache)
        tokens = slice(int(scores.starts[at]), int(scores.starts[at + 1]))
        assert scores.tokens[tokens].tolist() == request.pieces[piece].tokens.tolist()
        assert scores.positions[tokens].tolist() == placement.positions(piece).tolist()
        sources = zip(scores.predicted_at[tokens].tolist(), scores.score_slots[tokens].tolist(), strict=True)
        for offset, (predicted_at, slot) in enumerate(sources):
            position = depth + offset
            if position == 0:
                assert (predicted_at, slot) == (-1, -1)
            elif position in from_cache:
                assert predicted_at == -1
                assert slot == scores.cache_slots[tokens][offset] >= 0
            else:
                assert slot == -1
                assert case.sequences[predicted_at] == path[:position]
                assert predicted_at in places
    assert len(scores.tokens) == scores.starts[-1]


@many
@given(cases())
def test_new_scores_are_written_beside_their_own_tokens(case: Case) -> None:
    # The cache stores every second offered block in a block that it does not use yet.
    offered = np.arange(len(case.packed.offered.hashes))
    blocks = np.where(offered % 2, offered + 64, -1)
    stored = case.packed.storing(blocks).stored
    contents = {block.block: case.sequences[block.positions[-1]] for block in stored}
    assert len(contents) == len(stored)
    stored_positions = {position for block in stored for position in block.positions.tolist()}
    contents |= {block: path for (_, path), block in case.cache.blocks.items()}
    scores = case.packed.scores
    slots = case.packed.written_slots(blocks)
    assert not (slots[scores.predicted_at < 0] >= 0).any()
    at = 0
    for number, piece in scores.pieces:
        path, depth = full_path(case.requests[number], piece), piece_depth(case.requests[number], piece)
        for position in range(depth, len(path)):
            if slots[at] >= 0:
                block, offset = divmod(int(slots[at]), BLOCK_TOKENS)
                assert contents[block][: len(contents[block]) - 15 + offset] == path[: position + 1]
            elif scores.predicted_at[at] >= 0:
                assert scores.cache_slots[at] < 0
                assert int(scores.positions[at]) not in stored_positions
            at += 1


@pytest.mark.slow
@many
@given(cases())
def test_flops_are_those_of_all_visible_pairs(case: Case) -> None:
    """Pairs are counted one by one, and each layer's FLOPs per pair come from attention of one token to itself.

    Unread tokens end with the attention of the last layer: a matrix of 8 by 8 and three of 8 by 16 are left out.
    """
    flops = [0] * len(case.requests)
    behind_attention = 2 * (8 * 8 + 3 * 8 * 16)
    for layer in LAYERS:
        attention = layer.attention
        per_pair = attention_flops(attention, 1, 1)
        for (_, path), owner in case.naive.first_owners.items():
            q = len(path) - 1
            nearest = {
                "full": 0,
                "sliding": q - (attention.window or 0) + 1,
                "chunked": q - q % (attention.window or 1),
            }[attention.kind]
            pairs = sum(1 for k in range(q + 1) if k >= nearest)
            flops[owner] += flops_per_token(layer, ARCHITECTURE.hidden) + pairs * per_pair
    for owner in case.naive.first_owners.values():
        flops[owner] -= behind_attention
    for owner in case.naive.first_readers.values():
        flops[owner] += behind_attention
    for owner in case.naive.first_logit_readers.values():
        flops[owner] += head_flops(ARCHITECTURE, 1)
    assert [placement.usage.flops for placement in case.packed.placements] == flops
    assert case.packed.flops == sum(flops)


@pytest.mark.slow
@many
@given(cases())
def test_usage_counts_distinct_tokens(case: Case) -> None:
    for request, placement in zip(case.requests, case.packed.placements, strict=True):
        prefixes = request_prefixes(request)
        cached = set()
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            # Cached blocks of another request with the same sequence count as well.
            cached |= {(request.salt, path[:end]) for end in range(1, len(path) + 1)}
        held = set()
        for other_request in case.requests:
            for piece in range(len(other_request.pieces)):
                path = full_path(other_request, piece)
                count = case.cache.held(other_request.salt, path) * BLOCK_TOKENS
                held |= {(other_request.salt, path[:end]) for end in range(1, count + 1)}
        assert placement.usage.tokens == len(prefixes)
        assert placement.usage.cached_tokens == len((cached & held) - case.naive.computed)


@many
@given(cases())
def test_computed_blocks_are_offered_with_who_shares_them(case: Case) -> None:
    offered, names = case.packed.offered, {}
    expected: dict[tuple[bytes, tuple[int, ...]], set[int]] = collections.defaultdict(set)
    for number, request in enumerate(case.requests):
        hashes = request_hashes(request, KEY)
        for piece in range(len(request.pieces)):
            path = full_path(request, piece)
            first = piece_depth(request, piece) // BLOCK_TOKENS
            for at in range(int(hashes.starts[piece]), int(hashes.starts[piece + 1])):
                prefix = (request.salt, path[: (first + at - int(hashes.starts[piece]) + 1) * BLOCK_TOKENS])
                names[hashes.hashes[at]] = prefix
                if prefix in case.naive.computed and prefix not in case.cache.blocks:
                    expected[prefix].add(number)
    assert {names[name] for name in offered.hashes} == set(expected)
    assert len(set(offered.hashes)) == len(offered.hashes)
    inner = {(salt, path[:-1]) for salt, path in case.naive.computed}
    for number, name in enumerate(offered.hashes):
        salt, path = names[name]
        before = offered.previous[number]
        assert (path[:-BLOCK_TOKENS] or None) == (None if before is None else names[before][1])
        assert before not in offered.hashes[number:]
        assert offered.requests[number] == len(expected[salt, path])
        leaves = [leaf for leaf in case.naive.computed - inner if leaf[0] == salt and leaf[1][: len(path)] == path]
        assert offered.branches[number] == len(leaves)
        ends = range(len(path) - BLOCK_TOKENS + 1, len(path) + 1)
        assert [case.sequences[position] for position in offered.positions[number]] == [path[:end] for end in ends]


@many
@given(requests_to_pack())
def test_without_a_cache_nothing_is_cached_or_offered(requests: list[Request]) -> None:
    packed = pack(requests, TABLE)
    assert not packed.batch.contexts
    assert not packed.offered.hashes
    nothing = [NaiveCache().match(request) for request in requests]
    looked_up = pack(requests, TABLE, nothing)
    assert packed.batch.tokens.tolist() == looked_up.batch.tokens.tolist()
    assert packed.flops == looked_up.flops <= unshared_flops(requests, TABLE)
