"""States of a step through trie attention: one stream of tokens, every distinct prefix once."""

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
    """Runs steps through `forward`, a `TrieBackbone`, compiled or not. `memory` None: nothing is cached."""

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
        """The states at `batch.places`, [m, hidden]. Raises as `RunningStep`."""
        # torch.compile takes sizes 0 and 1 for constants and compiles again, so there are at least two of each.
        padded = _with_two_tokens(batch)
        places = np.resize(batch.places, max(2, len(batch.places)))
        ids, positions, read = (
            torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for array in (padded.tokens[None], padded.depth[None], places)
        )
        for tensor in (ids, positions):
            torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(read, 0)
        with running_step(RunningStep(padded, self.layers, self.memory, self.device)):
            return self.forward(ids, positions, read)[: len(batch.places)]


def _with_two_tokens(batch: StepBatch) -> StepBatch:
    """`batch`, with a sequence of one token more where it has only one."""
    if batch.count != 1:
        return batch
    return dataclasses.replace(
        batch,
        tokens=np.append(batch.tokens, 0),
        depth=np.append(batch.depth, 0),
        subtree_end=np.append(batch.subtree_end, 2),
        nodes=(*batch.nodes, TrieNode(1, 2, -1, 2)),
    )
