"""True FLOPs in exact integers: of tokens behind a prefix, and of a step.

What a token costs depends on its depth alone: it meets the same weights as every other token, and it sees all tokens
before it (or those in its window), whether they are in the step, shared, or cached. So a sequence of n tokens costs
`total(n)`, tokens behind a prefix cost a difference of two totals, and a step costs the sum over the nodes of its trie:
that is the least that any computation of these sequences takes, each distinct token once.

Every number comes from `moepass.models.formulas`. `FlopsTable` asks them once per architecture.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from moepass.models.formulas import attention_flops, flops_per_token, head_flops, layer_flops
from moepass.models.sizes.architecture import Architecture
from moepass.runtime.serving.batching.step_batch import StepBatch


class FlopsTable:
    """FLOPs of one architecture, without the head, for a router that asks 100,000 times per second.

    Between two windows of sliding attention, the FLOPs of a sequence are a quadratic function of its length, so three
    values give all others, exactly. Chunked attention begins anew with each chunk and is kept beside.

    logit_flops     FLOPs of the logits at one place
    """

    __slots__ = ("_chunks", "_quadratic", "_ranges", "_starts", "logit_flops")

    def __init__(self, architecture: Architecture) -> None:
        hidden = architecture.hidden
        counts = architecture.layer_counts
        chunked = {layer: count for layer, count in counts.items() if layer.attention.kind == "chunked"}
        windows = {layer.attention.window for layer in counts if layer.attention.kind == "sliding"}

        def unchunked_flops(tokens: int) -> int:
            found = tokens * sum(count * flops_per_token(layer, hidden) for layer, count in chunked.items())
            for layer, count in counts.items():
                if layer not in chunked:
                    found += count * layer_flops(layer, hidden, 1, tokens)
            return found

        def chunk_flops(size: int) -> Callable[[int], int]:
            same = {layer: count for layer, count in chunked.items() if layer.attention.window == size}
            return lambda tokens: sum(
                count * attention_flops(layer.attention, 1, tokens) for layer, count in same.items()
            )

        self.logit_flops: int = head_flops(architecture, 1)
        self._starts = sorted({0, *(window for window in windows if window is not None)})
        self._ranges = [_differences(unchunked_flops, start) for start in self._starts]
        sizes = sorted({layer.attention.window for layer in chunked if layer.attention.window is not None})
        self._chunks = [(size, _differences(chunk_flops(size), 0)) for size in sizes]
        self._quadratic = self._ranges[0] if len(self._ranges) == 1 and not self._chunks else None

    @classmethod
    def of_parameters(cls, parameters: int, logit_parameters: int) -> FlopsTable:
        """Of a model whose architecture is not known: 2 FLOPs for each parameter that a token meets."""
        table = cls.__new__(cls)
        table.logit_flops = 2 * logit_parameters
        table._starts, table._chunks = [0], []
        table._ranges = [(0, 2 * parameters, 0)]
        table._quadratic = table._ranges[0]
        return table

    def total(self, tokens: int) -> int:
        """FLOPs of a sequence of `tokens` tokens."""
        number = bisect.bisect_right(self._starts, tokens) - 1
        found = _after(self._ranges[number], tokens - self._starts[number])
        for size, differences in self._chunks:
            whole, rest = divmod(tokens, size)
            found += whole * _after(differences, size) + _after(differences, rest)
        return found

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """FLOPs of `new_tokens` tokens behind `prefix_tokens` that are there already."""
        end = prefix_tokens + new_tokens
        if self._quadratic is None:
            return self.total(end) - self.total(prefix_tokens)
        # The difference of two values of one quadratic function, for models of one range: the router's fast path.
        _, slope, growth = self._quadratic
        return new_tokens * slope + (end * (end - 1) - prefix_tokens * (prefix_tokens - 1)) // 2 * growth


def row_lengths(batch: StepBatch) -> list[int]:
    """Tokens of each sequence of a step without a cache, where every one is a row of its own."""
    return [int(batch.depth[node.end - 1]) + 1 for node in batch.nodes if node.subtree_end == node.end]


def _differences(total: Callable[[int], int], start: int) -> tuple[int, int, int]:
    """Newton's forward differences of a quadratic function: its value at `start`, and the first and second of them."""
    first, second, third = (total(start + step) for step in range(3))
    return first, second - first, third - 2 * second + first


def _after(differences: tuple[int, int, int], steps: int) -> int:
    """The value of a quadratic function `steps` steps after that of its `differences`."""
    value, slope, growth = differences
    return value + steps * slope + steps * (steps - 1) // 2 * growth
