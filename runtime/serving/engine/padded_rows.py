"""States of a step for models that cannot take a trie: every branch becomes a row of its own, padded on the right.

Recurrent layers and state spaces read their tokens in order, so each sequence is computed whole, shared prefixes again
in every row. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from moepass.runtime.serving.batching.step_batch import Indices, StepBatch

# Tokens of a row up to which a graph must hold. Indices of larger tensors may need 64 bits, and so another graph.
MOST_COMPILED_WIDTH = 1 << 17

# (input_ids [rows, tokens], attention_mask [rows, tokens], flat places [n] in rows * tokens) -> states [n, hidden]
RowsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PaddedRows:
    """Rows run in groups of at most `most_tokens` tokens, padding included, or one row alone."""

    def __init__(self, forward: RowsForward, device: torch.device, most_tokens: int) -> None:
        self.forward, self.device, self.most_tokens = forward, device, most_tokens

    @torch.no_grad()
    def states(self, batch: StepBatch) -> torch.Tensor:
        """The states at `batch.places`, [m, hidden]. Raises ValueError for a step that uses or fills a cache."""
        if batch.contexts or batch.stored:
            raise ValueError("padded rows use no cache; the step hangs on cached blocks or stores some")
        rows = list(_rows(batch))
        row_of = np.full(batch.count, -1, np.int64)
        for number, positions in enumerate(rows):
            fresh = positions[row_of[positions] < 0]
            row_of[fresh] = number
        owners = row_of[batch.places]
        parts: list[torch.Tensor] = []
        order: list[Indices] = []
        for group in self._groups(rows):
            read = np.flatnonzero(np.isin(owners, group))
            if len(read):
                order.append(read)
                parts.append(self._run(batch, rows, group, owners[read], batch.depth[batch.places[read]]))
        found = torch.cat(parts)
        restored = torch.empty_like(found)
        restored[torch.from_numpy(np.concatenate(order)).to(found.device)] = found
        return restored

    def _groups(self, rows: list[Indices]) -> Iterator[list[int]]:
        group: list[int] = []
        width = 0
        for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
            if group and width * (len(group) + 1) > self.most_tokens:
                yield group
                group = []
            width = width if group else len(rows[number])
            group.append(number)
        if group:
            yield group

    def _run(
        self, batch: StepBatch, rows: list[Indices], group: list[int], owners: Indices, depths: Indices
    ) -> torch.Tensor:
        # torch.compile takes sizes 0 and 1 for constants and compiles again, so there are at least two of each.
        width, height = max(2, len(rows[group[0]])), max(2, len(group))
        tokens = np.zeros((height, width), np.int64)
        mask = np.zeros((height, width), np.int64)
        mask[:, 0] = 1  # a row without a token would have no probabilities
        for place, number in enumerate(group):
            tokens[place, : len(rows[number])] = batch.tokens[rows[number]]
            mask[place, : len(rows[number])] = 1
        local = np.empty(len(rows), np.int64)
        local[group] = np.arange(len(group))
        places = local[owners] * width + depths
        flat = np.resize(places, max(2, len(places)))
        inputs = [torch.from_numpy(array).to(self.device) for array in (tokens, mask, flat)]
        # One graph for all widths, or none: loops over chunks of tokens would be compiled for each number of chunks.
        limits = {"min": 2, "max": MOST_COMPILED_WIDTH} if width <= MOST_COMPILED_WIDTH else {}
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 1, **limits)
        torch._dynamo.mark_dynamic(inputs[2], 0)
        return self.forward(*inputs)[: len(places)]


def _rows(batch: StepBatch) -> Iterator[Indices]:
    """The positions of every sequence of the trie, from its first token to the end of a leaf."""
    chains: list[Indices] = []
    for node in batch.nodes:
        own = np.arange(node.start, node.end)
        chain = own if node.parent < 0 else np.concatenate([chains[node.parent], own])
        chains.append(chain)
        if node.subtree_end == node.end:
            yield chain
