"""The step that runs: what the attention operator needs of it beside the tensors of the graph.

A captured graph would freeze a trie that was given to it as an argument. So the graph holds the number of the layer
alone, and the operator finds here which trie it is about.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.attention.attention_layers import AttentionLayer
from moepass.runtime.serving.attention.partial_attention import additive_mask
from moepass.runtime.serving.attention.trie_parts import OwnPart, TrieParts, VisiblePast, trie_parts
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedParts:
    """Parts for all layers in which tokens see the same of their past; masks by part, made once."""

    parts: TrieParts
    masks: Mapping[OwnPart, torch.Tensor]
    first_seen: torch.Tensor


class RunningStep:
    """A step on a device. Raises InputError where its records do not fit together or to the memory of blocks."""

    def __init__(
        self,
        step: StepBatch,
        layers: Mapping[int, AttentionLayer],
        memory: BlockMemory | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if memory is None and (step.contexts or step.stored):
            raise InputError(
                f"the step has {len(step.contexts)} contexts and {len(step.stored)} blocks to store, and there is no "
                "memory of blocks",
                name="memory",
            )
        self.step, self.layers, self.memory, self.device = step, layers, memory, torch.device(device)
        self.depth = self._on_device(step.depth)
        self.subtree_end = self._on_device(step.subtree_end)
        self.contexts = [self._on_device(np.asarray(chain, np.int64)) for chain in step.contexts]
        self.context_tokens = [len(chain) * BLOCK_TOKENS for chain in step.contexts]
        self.stored_blocks = self._on_device(np.asarray([one.block for one in step.stored], np.int64))
        self.stored_positions = self._on_device(
            np.asarray([one.positions for one in step.stored], np.int64).reshape(-1, BLOCK_TOKENS)
        )
        self._prepared: dict[tuple[VisiblePast, int], PreparedParts] = {}
        for number, node in enumerate(step.nodes):
            before = self.context_tokens[node.context] if node.context >= 0 else 0
            if node.parent < 0 and step.depth[node.start] != before:
                raise InputError(
                    f"node {number} begins at depth {step.depth[node.start]} behind {before} cached tokens",
                    name=f"node {number}",
                    value=int(step.depth[node.start]),
                    expected=before,
                )

    def layer(self, number: int) -> AttentionLayer:
        found = self.layers.get(number)
        if found is None:
            raise MoepassError(
                f"layer {number} calls for attention over a trie; the model's layers are {sorted(self.layers)}",
                name=f"layer {number}",
                value=number,
                expected=sorted(self.layers),
            )
        return found

    def prepared(self, past: VisiblePast, pair_flops: int) -> PreparedParts:
        """The parts for layers in which tokens see `past`, made when the first of them asks."""
        key = (past, pair_flops)
        if key not in self._prepared:
            parts = trie_parts(self.step.nodes, self.step.depth, self.context_tokens, past, pair_flops)
            first_seen = self._on_device(past.first_seen(self.step.depth))
            masks = {part: self._mask(part, first_seen) for part in parts.own if not part.is_causal}
            self._prepared[key] = PreparedParts(parts, masks, first_seen)
        return self._prepared[key]

    def _mask(self, part: OwnPart, first_seen: torch.Tensor) -> torch.Tensor:
        """[n, n]: 0 where a token sees another, -inf elsewhere."""
        rows = slice(part.start, part.end)
        places = torch.arange(part.start, part.end, device=self.device)
        visible = (places <= places[:, None]) & (places[:, None] < self.subtree_end[rows])
        return additive_mask(visible & (self.depth[rows] >= first_seen[rows, None]))

    def _on_device(self, numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.device)


_running: contextvars.ContextVar[RunningStep] = contextvars.ContextVar("moepass_running_step")


@contextlib.contextmanager
def running_step(step: RunningStep) -> Iterator[None]:
    """Attention of a model that this thread calls in this block is that of `step`. Other threads have steps of theirs."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def the_running_step() -> RunningStep:
    """Raises MoepassError outside of `running_step`."""
    found = _running.get(None)
    if found is None:
        raise MoepassError(
            "the model's attention is `moepass_trie`, and no step runs: call it inside `running_step(...)`",
            name="running_step",
        )
    return found
