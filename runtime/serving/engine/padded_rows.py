"""Steps for models that cannot run a trie: each branch becomes a separate row, padded on the right.

Recurrent layers and state spaces read tokens in order, so each row computes its complete sequence, shared prefixes
included. Nothing is cached.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from moepass.runtime.serving.batching.step_batch import Indices, StepBatch
from moepass.runtime.serving.engine.plain_outputs import Forward
from moepass.runtime.system.joint_copies import as_graph_inputs, upload

# Longest row that a compiled graph must support. Longer rows may need 64-bit indices, and so another graph, for which a
# request would have to wait.
MOST_COMPILED_WIDTH = 1 << 17


class RowsBackbone(nn.Module):
    """A backbone over padded rows that returns hidden states only for tokens whose output is requested."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the states [m, hidden] at `places` [m], indices into the flattened rows [rows * tokens]."""
        states: torch.Tensor = self.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return states.flatten(0, 1)[places]


class PaddedRows:
    """Runs steps as groups of rows with at most `most_tokens` tokens, padding included, or a single longer row.

    `forward` is a `RowsBackbone`, and may be replaced by the same one compiled. Rows of more than MOST_COMPILED_WIDTH
    tokens run uncompiled.
    """

    def __init__(self, forward: Forward, device: torch.device, most_tokens: int) -> None:
        self._uncompiled = self.forward = forward
        self.device, self.most_tokens = device, most_tokens

    def run(self, batch: StepBatch, indices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the states, and `indices` on their device."""
        return self.states(batch), upload(indices, self.device)

    @torch.no_grad()
    def states(self, batch: StepBatch) -> torch.Tensor:
        """Return the states [m, hidden] at `batch.output_positions`. Raises ValueError if cached blocks are used."""
        if batch.contexts or batch.stored:
            raise ValueError("padded rows have no cache, but the step reads or stores cached blocks")
        rows = list(batch.sequences())
        row_of = np.empty(batch.count, np.int64)
        for number, positions in enumerate(rows):
            row_of[positions] = number  # a shared prefix is read in the last row that has it
        owners = row_of[batch.output_positions]
        group_states: list[torch.Tensor] = []
        order: list[Indices] = []
        by_length = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        while by_length:
            size = max(1, self.most_tokens // len(rows[by_length[0]]))
            group, by_length = by_length[:size], by_length[size:]
            read = np.flatnonzero(np.isin(owners, group))
            if len(read):
                order.append(read)
                group_states.append(
                    self._run(batch, rows, group, owners[read], batch.depth[batch.output_positions[read]])
                )
        states = torch.cat(group_states)
        ordered = torch.empty_like(states)
        ordered[upload(torch.from_numpy(np.concatenate(order)), states.device)] = states
        return ordered

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
        inputs = as_graph_inputs(upload([*map(torch.from_numpy, (tokens, mask, padded_indices))], self.device))
        if width > MOST_COMPILED_WIDTH:
            return self._uncompiled(*inputs)[: len(flat_indices)]
        # The explicit range refuses a model whose loops over chunks of tokens need a graph for each number of chunks.
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 1, min=2, max=MOST_COMPILED_WIDTH)
        torch._dynamo.mark_dynamic(inputs[2], 0)
        return self.forward(*inputs)[: len(flat_indices)]
