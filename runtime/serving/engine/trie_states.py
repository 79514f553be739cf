"""Steps with trie attention: one stream of tokens, with every distinct prefix once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moepass.runtime.serving.attention.last_layer import LastLayer
from moepass.runtime.serving.attention.running_step import RunningStep, running_step
from moepass.runtime.serving.attention.survey import AttentionLayer, AttentionSurvey
from moepass.runtime.serving.batching.step_batch import StepBatch, TrieNode
from moepass.runtime.serving.cache.block_memory import BlockMemory
from moepass.runtime.serving.engine.model_head import ModelHead
from moepass.runtime.serving.engine.padded_rows import RowsBackbone
from moepass.runtime.serving.engine.plain_outputs import (
    Forward,
    PlainOutputs,
    check_outputs,
    check_single_reads,
    sequence_step,
)
from moepass.runtime.system.joint_copies import as_graph_inputs

logger = logging.getLogger("moepass")


class TrieBackbone(nn.Module):
    """A backbone over one stream of tokens that returns hidden states only for tokens whose output is requested.

    Attention takes the trie from the running step. With `last_layer`, which is attached to `backbone`, the last layer
    computes only these tokens.
    """

    def __init__(self, backbone: nn.Module, last_layer: LastLayer | None = None) -> None:
        super().__init__()
        self.backbone, self.last_layer = backbone, last_layer

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the states [m, hidden] at `places` [m] of the stream [1, n]."""
        if self.last_layer is None:
            return self._states(input_ids, position_ids)[0, places]
        self.last_layer.read(places)
        try:
            return self._states(input_ids, position_ids)[0]
        finally:
            self.last_layer.forget()

    def _states(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        return states


class TrieStates:
    """Runs steps of a model with trie attention.

    `forward` is a `TrieBackbone`, compiled or not. `layers` are the model's attention layers by their index. `memory`
    stores the cache blocks, None without a cache.
    """

    def __init__(
        self, forward: Forward, layers: Mapping[int, AttentionLayer], memory: BlockMemory | None, device: torch.device
    ) -> None:
        self.forward, self.layers, self.memory, self.device = forward, layers, memory, device

    def states(self, batch: StepBatch) -> torch.Tensor:
        """Return the states [m, hidden] at `batch.output_positions`. Raises the errors of `RunningStep`."""
        return self.run(batch, ())[0]

    @torch.no_grad()
    def run(self, batch: StepBatch, indices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the states, and `indices` on their device: one copy uploads these and the step."""
        # torch.compile treats sizes 0 and 1 as constants and would recompile, so every size is at least 2.
        padded = _with_two_tokens(batch)
        places = np.resize(batch.output_positions, max(2, len(batch.output_positions)))
        inputs = tuple(
            torch.from_numpy(np.ascontiguousarray(array)) for array in (padded.tokens[None], padded.depth[None], places)
        )
        running = RunningStep(padded, self.layers, self.memory, self.device, (*inputs, *indices))
        ids, positions, read = as_graph_inputs(running.inputs[:3])
        for tensor in (ids, positions):
            torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(read, 0)
        with running_step(running):
            return self.forward(ids, positions, read)[: len(batch.output_positions)], running.inputs[3:]


def _with_two_tokens(batch: StepBatch) -> StepBatch:
    """Return `batch`, padded with a sequence of one token if the batch has only one token."""
    if batch.count != 1:
        return batch
    return dataclasses.replace(
        batch,
        tokens=np.append(batch.tokens, 0),
        depth=np.append(batch.depth, 0),
        subtree_end=np.append(batch.subtree_end, 2),
        nodes=(*batch.nodes, TrieNode(1, 2, -1, 2)),
    )


class Narrowing(NamedTuple):
    """A backbone, and whether its last layer computes only the read tokens.

    Attributes:
        obstacle: the reason why the last layer computes all tokens; empty if it computes only the read tokens.
        handle: removes the hook that narrows the last layer; None if it computes all tokens.
    """

    backbone: TrieBackbone | RowsBackbone
    obstacle: str = ""
    handle: RemovableHandle | None = None

    def undone(self, error: Exception) -> Narrowing:
        """Return a backbone whose last layer computes all tokens because of `error`."""
        if self.handle is not None:
            self.handle.remove()
        obstacle = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("the last layer computes all tokens instead of the read ones: %s", obstacle)
        logger.debug("the last layer computes all tokens", exc_info=error)
        return Narrowing(TrieBackbone(self.backbone.backbone), obstacle)


def narrowed(head: ModelHead, survey: AttentionSurvey, plain: PlainOutputs, runner: TrieStates) -> Narrowing:
    """Return a backbone whose last layer computes only the read tokens, and let `runner` run this backbone.

    If that changes the outputs or fails, the last layer of the backbone computes all tokens. Raises InputError if the
    outputs still differ from the model's own.
    """
    assert survey.last is not None
    last_layer = LastLayer()
    unnarrowed = TrieStates(TrieBackbone(head.backbone), runner.layers, runner.memory, runner.device)
    narrowing = Narrowing(TrieBackbone(head.backbone, last_layer))
    try:
        narrowing = narrowing._replace(handle=last_layer.attach(head.backbone, survey.last))
        last_layer.learn(lambda count: unnarrowed.states(sequence_step(count)))
        runner.forward = narrowing.backbone
        check_outputs(plain, head, runner)
        check_single_reads(plain, head, runner, unnarrowed)
    except Exception as error:  # the model's own code may not expect different numbers of tokens
        narrowing = narrowing.undone(error)
        runner.forward = narrowing.backbone
        check_outputs(plain, head, runner)
    return narrowing
