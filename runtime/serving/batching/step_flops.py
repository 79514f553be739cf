"""FLOPs of steps and requests without padding, in exact integers.

The cost of a token depends only on its depth: it passes the same weights as every other token, and attends to all
tokens before it (or those in its window), whether they are in the step, shared, or cached. So a sequence of n tokens
costs `total(n)`, and tokens after a prefix cost the difference of two totals. A step costs the sum over the nodes of
its trie, plus the reads of states. No computation of these sequences takes fewer FLOPs: each distinct token runs once.

Every number comes from `moepass.models.formulas`. `FlopsTable` evaluates them once per architecture.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from moepass.models.formulas.attention import attention_flops
from moepass.models.formulas.layers import flops_behind_attention, flops_per_token, head_flops, layer_flops
from moepass.models.sizes.architecture import Architecture
from moepass.runtime.serving.batching.block_hashes import NO_HASHES, RequestHashes, request_hashes
from moepass.runtime.serving.batching.cached_chains import cached_chains
from moepass.runtime.serving.batching.needed_outputs import needed_outputs
from moepass.runtime.serving.batching.request_pieces import request_pieces
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.requests.request import Request


class FlopsTable:
    """FLOPs of one architecture without the head, fast enough for the router's 100,000 lookups per second.

    Between two windows of sliding attention, the FLOPs of a sequence are a quadratic function of its length, so three
    values determine it exactly. Chunked attention restarts with each chunk and is stored separately.

    Attributes:
        read_flops: FLOPs of the last layer after its attention at one position, which the step skips for unread tokens.
            0 if `narrows` is False, because then all tokens pass through the complete layer.
        logit_flops: FLOPs of the logits at one position, without `read_flops`.
    """

    __slots__ = ("_chunks", "_quadratic", "_ranges", "_starts", "logit_flops", "read_flops")

    def __init__(self, architecture: Architecture, *, narrows: bool = True) -> None:
        hidden = architecture.hidden
        read_flops = flops_behind_attention(architecture.layers[-1], hidden) if narrows else 0
        counts = architecture.layer_counts
        chunked = {layer: count for layer, count in counts.items() if layer.attention.kind == "chunked"}
        windows = {layer.attention.window for layer in counts if layer.attention.kind == "sliding"}

        def unchunked_flops(tokens: int) -> int:
            weights = sum(count * flops_per_token(layer, hidden) for layer, count in chunked.items())
            flops = tokens * (weights - read_flops)
            for layer, count in counts.items():
                if layer not in chunked:
                    flops += count * layer_flops(layer, hidden, 1, tokens)
            return flops

        def chunk_flops(size: int) -> Callable[[int], int]:
            equal_layers = {layer: count for layer, count in chunked.items() if layer.attention.window == size}
            return lambda tokens: sum(
                count * attention_flops(layer.attention, 1, tokens) for layer, count in equal_layers.items()
            )

        self.read_flops: int = read_flops
        self.logit_flops: int = head_flops(architecture, 1)
        self._starts = sorted({0, *(window for window in windows if window is not None)})
        self._ranges = [_differences(unchunked_flops, start) for start in self._starts]
        sizes = sorted({layer.attention.window for layer in chunked if layer.attention.window is not None})
        self._chunks = [(size, _differences(chunk_flops(size), 0)) for size in sizes]
        self._quadratic = self._ranges[0] if len(self._ranges) == 1 and not self._chunks else None

    @classmethod
    def of_parameters(cls, parameters: int, logit_parameters: int) -> FlopsTable:
        """Return the table of a model with an unknown architecture: 2 FLOPs per parameter and token."""
        table = cls.__new__(cls)
        table.read_flops, table.logit_flops = 0, 2 * logit_parameters
        table._starts, table._chunks = [0], []
        table._ranges = [(0, 2 * parameters, 0)]
        table._quadratic = table._ranges[0]
        return table

    def total(self, tokens: int) -> int:
        """Return the FLOPs of a sequence of `tokens` tokens without reads."""
        index = bisect.bisect_right(self._starts, tokens) - 1
        flops = _after(self._ranges[index], tokens - self._starts[index])
        for size, differences in self._chunks:
            chunks, remaining = divmod(tokens, size)
            flops += chunks * _after(differences, size) + _after(differences, remaining)
        return flops

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """Return the FLOPs of `new_tokens` tokens after a prefix of `prefix_tokens` computed or cached tokens."""
        end = prefix_tokens + new_tokens
        if self._quadratic is None:
            return self.total(end) - self.total(prefix_tokens)
        # Fast path of the router: with a single range, the result is the difference of two values of one quadratic.
        _, slope, growth = self._quadratic
        return new_tokens * slope + (end * (end - 1) - prefix_tokens * (prefix_tokens - 1)) // 2 * growth


def _differences(total: Callable[[int], int], start: int) -> tuple[int, int, int]:
    """Return the value of a quadratic function at `start`, and its first and second forward difference."""
    first, second, third = (total(start + step) for step in range(3))
    return first, second - first, third - 2 * second + first


def _after(differences: tuple[int, int, int], steps: int) -> int:
    """Return the value of a quadratic function `steps` steps after the point of its `differences`."""
    value, slope, growth = differences
    return value + steps * slope + steps * (steps - 1) // 2 * growth


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestCost:
    """The tokens, FLOPs and blocks that a request adds to a step with which it shares no token.

    There are no blocks if steps share no prefixes. A step that contains a block already saves its `block_flops`.
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

    Each piece with a needed output, and none in the pieces below it, is a separate sequence, from its first token to
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
