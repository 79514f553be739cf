"""Steps with trie attention: one stream of tokens, with every distinct prefix once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch

from moepass.runtime.serving.attention.attention_layers import AttentionLayer
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.batching.step_batch import StepBatch, TrieNode
from moepass.runtime.serving.cache.block_memory import BlockMemory

# (input_ids [1, n], position_ids [1, n], places [m]) -> states [m, hidden]
TrieForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TrieStates:
    """Runs steps of a model with trie attention.

    Args:
        forward: a `TrieBackbone`, compiled or not.
        layers: attention layers of the model, by their index.
        memory: memory of the cache blocks; None without a cache.
        device: device of the model.
    """

    def __init__(
        self,
        forward: TrieForward,
        layers: Mapping[int, AttentionLayer],
        memory: BlockMemory | None,
        device: torch.device,
    ) -> None:
        self.forward, self.layers, self.memory, self.device = forward, layers, memory, device

    @torch.no_grad()
    def states(self, batch: StepBatch) -> torch.Tensor:
        """Return the states [m, hidden] at `batch.output_positions`. Raises the errors of `RunningStep`."""
        # torch.compile treats sizes 0 and 1 as constants and would recompile, so every size is at least 2.
        padded = _with_two_tokens(batch)
        places = np.resize(batch.output_positions, max(2, len(batch.output_positions)))
        ids, positions, read = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (padded.tokens[None], padded.depth[None], places)
        )
        for tensor in (ids, positions):
            torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(read, 0)
        with running_step(RunningStep(padded, self.layers, self.memory, self.device)):
            return self.forward(ids, positions, read)[: len(batch.output_positions)]


def _with_two_tokens(batch: StepBatch) -> StepBatch:
    """Return `batch`, with another sequence of one token if it has only one token."""
    if batch.count != 1:
        return batch
    return dataclasses.replace(
        batch,
        tokens=np.append(batch.tokens, 0),
        depth=np.append(batch.depth, 0),
        subtree_end=np.append(batch.subtree_end, 2),
        nodes=(*batch.nodes, TrieNode(1, 2, -1, 2)),
    )
