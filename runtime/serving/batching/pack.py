"""Packing of requests into a step.

Contract
    in      requests, and the cached blocks of each
    out     a batch with each distinct needed token once, the positions of the tokens of each request, and the blocks
            that a cache may store

Pseudo-code
    request_pieces    the pieces of all requests in one table
                      pieces are merged where tokens are equal, requests of one salt only
    cached_chains     the cached blocks that the sequences begin with
    needed_outputs    the outputs that each piece reads, and the tokens to compute for them
    computed_parts    the needed tokens of the trie, each once, counted for the first request that needs it
    trie_stream       these tokens in depth-first order, after their cached blocks
    pack              positions that are read, blocks that a cache may store, and the cost of each request

Only requests with the same salt share tokens, in a step as in the cache. Sharing within a step would store nothing, but
it would reveal one tenant's request to another: the step is shorter, and the second request's `Usage` is smaller. The
router assumes the same, because its hashes cover the salt.

No loop here runs over tokens: Python walks pieces, nodes and parts, numpy moves tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.runtime.serving.batching.block_hashes import MatchedBlocks, OfferedBlocks
from moepass.runtime.serving.batching.cached_chains import CachedChains, cached_chains
from moepass.runtime.serving.batching.computed_parts import computed_parts
from moepass.runtime.serving.batching.needed_outputs import needed_outputs
from moepass.runtime.serving.batching.placement import (
    RequestPlacement,
    ScorePlaces,
    TokenMap,
    distinct,
    score_places,
    token_counts,
    token_map,
)
from moepass.runtime.serving.batching.request_pieces import piece_trie, request_pieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch, StoredBlock
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.batching.trie_stream import TrieStream, trie_stream
from moepass.runtime.serving.requests.answer import Usage
from moepass.runtime.serving.requests.request import Request


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedStep:
    """A step, and the mapping between its stream and the requests.

    Attributes:
        batch: the step, without blocks to store. It has no tokens if the cache holds everything.
        logit_places: ascending positions whose logits are read, a subset of `batch.output_positions`; the others are
            only read as vectors.
        read_positions: the positions of all reads, in the order of requests, pieces and reads.
        flops: cost of the step, the sum over `placements`.
    """

    batch: StepBatch
    placements: tuple[RequestPlacement, ...]
    logit_places: Indices
    read_positions: Indices
    scores: ScorePlaces
    offered: OfferedBlocks
    flops: int

    def storing(self, blocks: Indices) -> StepBatch:
        """Return the batch that stores each offered block in the cache block `blocks` [offered]; -1 stores nothing."""
        stored_numbers = np.flatnonzero(blocks >= 0)
        stored = tuple(StoredBlock(int(blocks[number]), self.offered.positions[number]) for number in stored_numbers)
        return dataclasses.replace(self.batch, stored=stored)

    def written_slots(self, blocks: Indices) -> Indices:
        """Return the slot [t] in which the cache stores each score that the step computes, -1 for none."""
        scores, is_stored = self.scores, blocks >= 0
        slot_of = np.full(self.batch.count + 1, -1, np.int64)  # the last entry is that of absent tokens, position -1
        slot_of[self.offered.positions[is_stored]] = blocks[is_stored, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        slots = np.where(scores.cache_slots >= 0, scores.cache_slots, slot_of[scores.positions])
        return np.where(scores.predicted_at >= 0, slots, -1)


def pack(
    requests: Sequence[Request], table: FlopsTable, matched: Sequence[MatchedBlocks | None] | None = None
) -> PackedStep:
    """Return a step that computes `requests`; `matched` are the cached blocks of each, None without a cache."""
    matches: Sequence[MatchedBlocks | None] = [None] * len(requests) if matched is None else matched
    pieces = request_pieces(requests)
    trie = piece_trie(pieces, requests)
    chains = cached_chains(pieces, matches)
    needed = needed_outputs(chains)
    computed = computed_parts(trie, needed.spans, table)
    stream = trie_stream(trie.trie, computed, chains)
    token_positions, visits = token_map(trie, computed, stream.part_starts)
    tokens, cached_tokens = token_counts(trie, chains, computed, visits)

    logit_readers = _first_readers(stream.batch.count, *token_positions.range_positions(needed.logits))
    vector_readers = _first_readers(stream.batch.count, *token_positions.range_positions(needed.vectors))
    is_logit_place = logit_readers >= 0
    has_both = is_logit_place & (vector_readers >= 0)
    # No reader is -1, so the maximum is the reader of a position that is read in one way only.
    first_readers, last_readers = np.minimum(logit_readers, vector_readers), np.maximum(logit_readers, vector_readers)
    readers = np.where(has_both, first_readers, last_readers)
    is_place = readers >= 0
    read_counts = np.bincount(readers[is_place], minlength=len(requests)).tolist()
    logit_counts = np.bincount(logit_readers[is_logit_place], minlength=len(requests)).tolist()
    flops = [
        token_flops + reads * table.read_flops + logits * table.logit_flops
        for token_flops, reads, logits in zip(computed.flops, read_counts, logit_counts, strict=True)
    ]
    placements = tuple(
        RequestPlacement(
            Usage(int(tokens[number]), int(cached_tokens[number]), flops[number]), first, pieces, token_positions
        )
        for number, first in enumerate(pieces.first_pieces)
    )
    read_tokens = [
        start + read.index for start, piece in zip(pieces.starts, pieces.pieces, strict=True) for read in piece.reads
    ]
    return PackedStep(
        dataclasses.replace(stream.batch, output_positions=np.flatnonzero(is_place)),
        placements,
        np.flatnonzero(is_logit_place),
        token_positions.positions(np.array(read_tokens, np.int64)),
        score_places(chains, needed, token_positions),
        _offered_blocks(chains, matches, stream, token_positions),
        sum(flops),
    )


def _first_readers(count: int, positions: Indices, readers: Indices) -> Indices:
    """Return the first request [count] that reads each position, -1 for none."""
    first_readers = np.full(count, -1, np.int64)
    # numpy keeps the last assignment, so the first reader is assigned last.
    first_readers[positions[::-1]] = readers[::-1]
    return first_readers


def _offered_blocks(
    chains: CachedChains, matched: Sequence[MatchedBlocks | None], stream: TrieStream, token_positions: TokenMap
) -> OfferedBlocks:
    """Return the blocks whose tokens are all computed and which the cache does not hold."""
    pieces = chains.pieces
    requests = np.array(pieces.requests, np.int64)
    depths = np.array(pieces.depths, np.int64)
    starts = np.array(pieces.starts, np.int64)
    first_blocks = np.array(chains.starts, np.int64)
    block_pieces = np.repeat(np.arange(len(depths)), np.diff(first_blocks))
    # Blocks of a piece are counted from the beginning of its sequence.
    numbers = np.arange(first_blocks[-1]) + (depths // BLOCK_TOKENS - first_blocks[:-1])[block_pieces]
    last_tokens = (starts - depths)[block_pieces] + (numbers + 1) * BLOCK_TOKENS - 1
    last_positions = token_positions.positions(last_tokens)
    offered = np.flatnonzero((chains.blocks < 0) & (last_positions >= 0))
    # Blocks with the same last token in the stream are the same block.
    last, first_offers, blocks = np.unique(last_positions[offered], return_index=True, return_inverse=True)
    asked = distinct(blocks * len(matched) + requests[block_pieces[offered]]) // max(len(matched), 1)
    order = np.lexsort((last, stream.batch.depth[last]))
    last = last[order]
    positions = np.empty((len(last), BLOCK_TOKENS), np.int64)
    for offset in reversed(range(BLOCK_TOKENS)):
        positions[:, offset] = last
        last = stream.previous[last]
    names: list[bytes] = []
    previous_names: list[bytes | None] = []
    for number in offered[first_offers[order]].tolist():
        request = pieces.requests[block_pieces[number]]
        match = matched[request]
        assert match is not None
        own_number = number - chains.starts[pieces.first_pieces[request]]
        previous = match.hashes.previous[own_number]
        names.append(match.hashes.hashes[own_number])
        previous_names.append(match.hashes.hashes[previous] if previous >= 0 else None)
    return OfferedBlocks(
        tuple(names),
        tuple(previous_names),
        np.bincount(asked, minlength=len(order))[order],
        stream.branches[positions[:, -1]],
        positions,
    )
