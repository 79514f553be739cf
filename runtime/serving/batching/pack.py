"""Requests become a step.

Contract
    in      requests, each with what a cache holds of it, or nothing
    out     a batch in which every distinct token that is needed stands once; where the tokens of each request stand;
            which blocks a cache may keep

Pseudo-code
    request_pieces    the pieces of all requests in one table
    piece_trie        pieces are merged where tokens are equal, requests of one salt only
    cached_chains     the cached blocks that the sequences begin with
    needed_outputs    what is read of each piece, and from where on its sequence has to be computed for that
    computed_parts    the needed tokens of the trie, each once, counted for the first request that needs it
    trie_stream       these in depth-first order, with the cached blocks before them
    pack              places that are read, blocks that a cache may keep, and what each request has cost

Only requests of the same salt share tokens, in a step as in the cache. To share inside a step would store nothing, but
a step in which two tenants ask the same is shorter, and what `Usage` says of the second is less: both would tell one
tenant of the other. It is also what the router reckons with, whose hashes have the salt in them.

No loop here runs over tokens: pieces, nodes and parts are walked in Python, tokens are moved by numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from moepass.models.errors import InputError
from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks, OfferedBlocks
from moepass.runtime.serving.batching.cached_chains import CachedChains, cached_chains
from moepass.runtime.serving.batching.computed_parts import computed_parts
from moepass.runtime.serving.batching.needed_outputs import needed_outputs
from moepass.runtime.serving.batching.piece_trie import piece_trie
from moepass.runtime.serving.batching.placement import (
    RequestPlacement,
    ScorePlaces,
    TokenMap,
    distinct,
    read_positions,
    score_places,
    token_counts,
    token_map,
)
from moepass.runtime.serving.batching.request_pieces import request_pieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch, StoredBlock
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.batching.trie_stream import TrieStream, trie_stream
from moepass.runtime.serving.requests.answer import Usage
from moepass.runtime.serving.requests.request import Request


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PackedStep:
    """
    batch           the step, without blocks to store. It may have no tokens: then the cache holds all that is asked
    placements      where the tokens of each request stand
    logit_places    those of `batch.places` whose logits are read, ascending; the others are read as vectors only
    read_positions  where the tokens stand that are read, of all reads of all pieces of all requests, in order
    scores          where the scores of all scored pieces come from
    used_blocks     cache blocks that the step reads, or whose scores answer a request, ascending
    offered         blocks that a cache may keep
    flops           what the step costs; the sum over `placements`
    """

    batch: StepBatch
    placements: tuple[RequestPlacement, ...]
    logit_places: Indices
    read_positions: Indices
    scores: ScorePlaces
    used_blocks: Indices
    offered: OfferedBlocks
    flops: int

    def storing(self, blocks: Indices) -> StepBatch:
        """The batch that stores the offered blocks in the cache's `blocks` [offered], -1 for those it does not keep."""
        kept = np.flatnonzero(blocks >= 0)
        stored = tuple(StoredBlock(int(blocks[number]), self.offered.positions[number]) for number in kept)
        return dataclasses.replace(self.batch, stored=stored)

    def stored_slots(self, blocks: Indices) -> Indices:
        """[n] the slot (block * BLOCK_TOKENS + place) that each token of the stream is stored in, -1 for none."""
        slots = np.full(self.batch.count, -1, np.int64)
        kept = blocks >= 0
        slots[self.offered.positions[kept]] = blocks[kept, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        return slots


def pack(
    requests: Sequence[Request], table: FlopsTable, matched: Sequence[MatchedBlocks | None] | None = None
) -> PackedStep:
    """A step that computes what `requests` ask for.

    `matched` says what the cache holds of each; None: there is no cache, and nothing is offered to one.

    Raises InputError where `matched` does not fit the requests.
    """
    found: Sequence[MatchedBlocks | None] = [None] * len(requests) if matched is None else matched
    if len(found) != len(requests):
        raise InputError(
            f"{len(found)} requests were looked up in the cache; {len(requests)} are packed",
            name="matched",
            value=len(found),
            expected=len(requests),
        )
    pieces = request_pieces(requests)
    trie = piece_trie(pieces, requests)
    chains = cached_chains(pieces, found)
    needed = needed_outputs(chains)
    computed = computed_parts(trie, needed.spans, table)
    stream = trie_stream(trie.trie, computed, chains)
    places, visits = token_map(trie, computed, stream.part_starts)
    tokens, cached_tokens = token_counts(trie, chains, computed, visits)

    logit_readers = _first_readers(stream.batch.count, *places.range_positions(needed.logits))
    vector_readers = _first_readers(stream.batch.count, *places.range_positions(needed.vectors))
    is_logit_place = logit_readers >= 0
    has_both = is_logit_place & (vector_readers >= 0)
    readers = np.where(has_both, *(one(logit_readers, vector_readers) for one in (np.minimum, np.maximum)))
    is_place = readers >= 0
    counts = (np.bincount(one[one >= 0], minlength=len(requests)).tolist() for one in (readers, logit_readers))
    flops = [
        tokens + reads * table.read_flops + logits * table.logit_flops
        for tokens, reads, logits in zip(computed.flops, *counts, strict=True)
    ]
    placements = tuple(
        RequestPlacement(Usage(int(tokens[number]), int(cached_tokens[number]), flops[number]), first, chains, places)
        for number, first in enumerate(pieces.first_pieces)
    )
    scores = score_places(chains, needed, places)
    used = [scores.score_slots[scores.score_slots >= 0] // BLOCK_TOKENS, *map(np.array, stream.batch.contexts)]
    return PackedStep(
        dataclasses.replace(stream.batch, places=np.flatnonzero(is_place)),
        placements,
        np.flatnonzero(is_logit_place),
        read_positions(pieces, places),
        scores,
        np.unique(np.concatenate(used)),
        _offered_blocks(chains, found, stream, places),
        sum(flops),
    )


def _first_readers(count: int, positions: Indices, readers: Indices) -> Indices:
    """[count] of each position the first of its readers, -1 where there is none."""
    found = np.full(count, -1, np.int64)
    # Later assignments win.
    found[positions[::-1]] = readers[::-1]
    return found


def _offered_blocks(
    chains: CachedChains, matched: Sequence[MatchedBlocks | None], stream: TrieStream, places: TokenMap
) -> OfferedBlocks:
    """The blocks whose tokens are all computed, those that the cache holds left out."""
    pieces = chains.pieces
    requests = np.array(pieces.requests, np.int64)
    depths = np.array(pieces.depths, np.int64)
    starts = np.array(pieces.starts, np.int64)
    first_blocks = np.array(chains.starts, np.int64)
    block_pieces = np.repeat(np.arange(len(depths)), np.diff(first_blocks))
    # Blocks of a piece are numbered from the beginning of its sequence.
    numbers = np.arange(first_blocks[-1]) + (depths // BLOCK_TOKENS - first_blocks[:-1])[block_pieces]
    last_tokens = (starts - depths)[block_pieces] + (numbers + 1) * BLOCK_TOKENS - 1
    last_positions = places.positions(last_tokens)
    offered = np.flatnonzero((chains.blocks < 0) & (last_positions >= 0))
    # A block is known by its last token in the stream.
    last, first_offers, blocks = np.unique(last_positions[offered], return_index=True, return_inverse=True)
    asked = distinct(blocks * len(matched) + requests[block_pieces[offered]]) // max(len(matched), 1)
    order = np.lexsort((last, stream.batch.depth[last]))
    last = last[order]
    positions = np.empty((len(last), BLOCK_TOKENS), np.int64)
    for place in reversed(range(BLOCK_TOKENS)):
        positions[:, place] = last
        last = stream.previous[last]
    names: list[bytes] = []
    before: list[bytes | None] = []
    for number in offered[first_offers[order]].tolist():
        request = pieces.requests[block_pieces[number]]
        one = matched[request]
        assert one is not None
        own_number = number - chains.starts[pieces.first_pieces[request]]
        previous = one.hashes.previous[own_number]
        names.append(one.hashes.hashes[own_number])
        before.append(one.hashes.hashes[previous] if previous >= 0 else None)
    return OfferedBlocks(
        tuple(names),
        tuple(before),
        np.bincount(asked, minlength=len(order))[order],
        stream.branches[positions[:, -1]],
        positions,
    )
