"""Costs of requests that depend on nothing but the request itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.runtime.serving.batching.block_hashes import NO_HASHES, RequestHashes, request_hashes
from moepass.runtime.serving.batching.cached_chains import cached_chains
from moepass.runtime.serving.batching.needed_outputs import needed_outputs
from moepass.runtime.serving.batching.request_pieces import request_pieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.requests.request import Request


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestCost:
    """The tokens and FLOPs that a request adds to a step with which it shares no token.

    Attributes:
        tokens: tokens to compute.
        flops: FLOPs of these tokens.
        hashes: the blocks of the request; none if steps share no prefixes.
        block_flops: [hashes] FLOPs of the tokens of each block, which a step that contains the block already saves.
    """

    tokens: int
    flops: int
    hashes: RequestHashes
    block_flops: tuple[int, ...]


def request_cost(request: Request, table: FlopsTable, key: bytes) -> RequestCost:
    """Return the cost of `request` in a step that is a trie. `key` is the key of its block hashes."""
    hashes = request_hashes(request, key)
    sizes = [len(piece.tokens) for piece in request.pieces]
    flops = sum(table.flops(depth, size) for depth, size in zip(request.depths(), sizes, strict=True))
    depths: list[int] = []
    for previous in hashes.previous.tolist():
        depths.append(depths[previous] + BLOCK_TOKENS if previous >= 0 else 0)
    return RequestCost(sum(sizes), flops, hashes, tuple(table.flops(depth, BLOCK_TOKENS) for depth in depths))


def row_cost(request: Request, table: FlopsTable) -> RequestCost:
    """Return the cost of `request` in a step of padded rows, padding excluded: each sequence is computed alone."""
    inner = {piece.parent for piece in request.pieces}
    lengths = [
        depth + len(piece.tokens)
        for number, (depth, piece) in enumerate(zip(request.depths(), request.pieces, strict=True))
        if number not in inner
    ]
    return RequestCost(sum(lengths), sum(map(table.total, lengths)), NO_HASHES, ())


def unshared_flops(requests: Sequence[Request], table: FlopsTable) -> int:
    """Return the FLOPs of `requests` without sharing and without a cache, as servers without a trie compute them.

    Each piece with a needed output, and none in the pieces below it, is a sequence of its own, from its first token to
    the last needed one. Outputs are read once per piece.
    """
    pieces = request_pieces(requests)
    needed = needed_outputs(cached_chains(pieces, [None] * len(requests)))
    # For each piece, the position right after the last token that its own outputs need.
    ends = [0] * len(pieces.pieces)
    for piece, _, end in needed.spans:
        ends[piece] = max(ends[piece], end)
    is_inside = [False] * len(pieces.pieces)
    flops = table.logit_flops * needed.logit_count + table.read_flops * needed.output_count
    for piece in reversed(range(len(pieces.pieces))):
        if ends[piece] and not is_inside[piece]:
            flops += table.total(ends[piece])
        parent = pieces.parents[piece]
        if parent >= 0 and (ends[piece] or is_inside[piece]):
            is_inside[parent] = True
    return flops
