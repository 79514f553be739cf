"""Steps for models that cannot run a trie: each branch becomes a separate row, padded on the right.

Recurrent layers and state spaces read tokens in order, so each row computes its complete sequence, shared prefixes
included. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from moepass.runtime.serving.batching.step_batch import Indices, StepBatch

# Longest row that a compiled graph must support. Longer rows may need 64-bit indices, and so another graph.
MOST_COMPILED_WIDTH = 1 << 17

# (input_ids [rows, tokens], attention_mask [rows, tokens], indices [n] into rows * tokens) -> states [n, hidden]
RowsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PaddedRows:
    """Runs steps as groups of padded rows.

    Args:
        forward: a `RowsBackbone`, compiled or not.
        device: device of the model.
        most_tokens: limit of the tokens of a group, padding included. A single row may be longer.
    """

    def __init__(self, forward: RowsForward, device: torch.device, most_tokens: int) -> None:
        self.forward, self.device, self.most_tokens = forward, device, most_tokens

    @torch.no_grad()
    def states(self, batch: StepBatch) -> torch.Tensor:
        """Return the states [m, hidden] at `batch.output_positions`.

        Raises:
            ValueError: the step reads or stores cached blocks.
        """
        if batch.contexts or batch.stored:
            raise ValueError("padded rows have no cache, but the step reads or stores cached blocks")
        rows = list(_rows(batch))
        row_of = np.full(batch.count, -1, np.int64)
        for number, positions in enumerate(rows):
            fresh = positions[row_of[positions] < 0]
            row_of[fresh] = number
        owners = row_of[batch.output_positions]
        group_states: list[torch.Tensor] = []
        order: list[Indices] = []
        for group in self._groups(rows):
            read = np.flatnonzero(np.isin(owners, group))
            if len(read):
                order.append(read)
                group_states.append(
                    self._run(batch, rows, group, owners[read], batch.depth[batch.output_positions[read]])
                )
        states = torch.cat(group_states)
        ordered = torch.empty_like(states)
        ordered[torch.from_numpy(np.concatenate(order)).to(states.device)] = states
        return ordered

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
        # torch.compile treats sizes 0 and 1 as constants and would recompile, so every size is at least 2.
        width, height = max(2, len(rows[group[0]])), max(2, len(group))
        tokens = np.zeros((height, width), np.int64)
        mask = np.zeros((height, width), np.int64)
        mask[:, 0] = 1  # a fully masked row would give NaN
        for row, number in enumerate(group):
            tokens[row, : len(rows[number])] = batch.tokens[rows[number]]
            mask[row, : len(rows[number])] = 1
        local = np.empty(len(rows), np.int64)
        local[group] = np.arange(len(group))
        flat_indices = local[owners] * width + depths
        padded_indices = np.resize(flat_indices, max(2, len(flat_indices)))
        inputs = [torch.from_numpy(array).to(self.device) for array in (tokens, mask, padded_indices)]
        # The explicit range refuses a model whose loops over chunks of tokens need a graph for each number of chunks.
        limits = {"min": 2, "max": MOST_COMPILED_WIDTH} if width <= MOST_COMPILED_WIDTH else {}
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 1, **limits)
        torch._dynamo.mark_dynamic(inputs[2], 0)
        return self.forward(*inputs)[: len(flat_indices)]


def _rows(batch: StepBatch) -> Iterator[Indices]:
    """Yield the positions of every sequence of the trie, from its first token to the end of a leaf."""
    chains: list[Indices] = []
    for node in batch.nodes:
        positions = np.arange(node.start, node.end)
        chain = positions if node.parent < 0 else np.concatenate([chains[node.parent], positions])
        chains.append(chain)
        if node.subtree_end == node.end:
            yield chain
