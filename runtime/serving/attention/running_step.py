"""The running step: the data that the attention operator needs in addition to the tensors of the graph."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from moepass.models.errors import MoepassError
from moepass.runtime.serving.attention.partial_attention import additive_mask
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import EarlierPart, OwnPart, VisiblePast, trie_parts
from moepass.runtime.serving.attention.varlen_attention import VarlenCall, varlen_calls
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory, block_bytes

# [Empirical] Own parts up to this length run in batches, because launching their kernels takes as long as running them.
# From 48 tokens on, batches are slower than a call for each part.
BATCHED_TOKENS = 32
# [Empirical] Lengths to which the parts of a batch are padded. Coarser steps are not faster and compute more.
_FILLED = range(4, BATCHED_TOKENS + 1, 4)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OwnBatch:
    """Own parts that are computed by one call.

    Attributes:
        rows: a slice of the stream, or indices [b, n] into it, padded with arbitrary rows.
        mask: additive mask [b or 1, n, n]; None for causal attention.
        result_indices: indices of the results that belong to tokens, among the b · n results; None for all.
        positions: positions in the stream of these results.
        keys: a slice that begins before `rows`; None if keys and queries are the same tokens. With it, the mask is
            computed for each layer, because the masks of all such parts would take too much memory.
    """

    rows: slice | torch.Tensor
    mask: torch.Tensor | None
    result_indices: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    keys: slice | None = None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedParts:
    """The parts of all layers in which tokens see the same past, with their masks and indices."""

    own: tuple[OwnBatch, ...]
    earlier: tuple[EarlierPart, ...]
    first_seen: torch.Tensor


class RunningStep:
    """A step on a device, with the model's attention `layers` by their index. `memory` is None without a cache.

    Raises MoepassError if the step uses blocks that `memory` does not have, or stores a block that it reads.
    """

    def __init__(
        self,
        step: StepBatch,
        layers: Mapping[int, AttentionLayer],
        memory: BlockMemory | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        read = {block for chain in step.contexts for block in chain}
        written = [block.block for block in step.stored]
        count = 0 if memory is None else memory.count
        used = [*read, *written]
        if len({*used}) < len(used) or not all(0 <= block < count for block in used):
            text = (
                f"the step stores the blocks {sorted(written)} and reads {sorted(read)}; it may store a block only "
                f"once, and no block that it reads, and the memory has {count} blocks"
            )
            raise MoepassError(text, name="stored", value=sorted(written))
        self.step, self.layers, self.memory, self.device = step, layers, memory, torch.device(device)
        self.depth = self._on_device(step.depth)
        self.subtree_end = self._on_device(step.subtree_end)
        self.contexts = [self._on_device(np.asarray(chain, np.int64)) for chain in step.contexts]
        self.context_tokens = [len(chain) * BLOCK_TOKENS for chain in step.contexts]
        self.stored_blocks = self._on_device(np.asarray([block.block for block in step.stored], np.int64))
        self.stored_positions = self._on_device(
            np.asarray([block.positions for block in step.stored], np.int64).reshape(-1, BLOCK_TOKENS)
        )
        self._prepared: dict[tuple[VisiblePast, int], PreparedParts] = {}
        self._calls: dict[tuple[VisiblePast, int], tuple[VarlenCall, ...] | None] = {}
        for root in (node for node in step.nodes if node.parent < 0):
            assert step.depth[root.start] == (self.context_tokens[root.context] if root.context >= 0 else 0)

    def layer(self, number: int) -> AttentionLayer:
        """Return the attention layer with the index `number`. Raises MoepassError if the model has no such layer."""
        if number not in self.layers:
            raise MoepassError(
                f"layer {number} called attention over a trie; the step was made for the layers {sorted(self.layers)}",
                name=f"layer {number}",
            )
        return self.layers[number]

    def prepared(self, past: VisiblePast, pair_flops: int) -> PreparedParts:
        """Return the parts for layers in which tokens see `past`. They are computed on the first call."""
        key = (past, pair_flops)
        if key not in self._prepared:
            parts = trie_parts(self.step.nodes, self.step.depth, self.context_tokens, past, pair_flops)
            first_seen = self._on_device(past.first_seen(self.step.depth))
            batches: dict[tuple[int, bool], list[OwnPart]] = {}
            for number, own_part in enumerate(parts.own):
                tokens = own_part.end - own_part.start
                # Long parts are not batched: the negative number is a key that no other part has.
                size = -number if own_part.before else next((length for length in _FILLED if length >= tokens), -number)
                batches.setdefault((size, own_part.is_causal), []).append(own_part)
            own_batches: list[OwnBatch] = []
            for (size, is_causal), same_size in batches.items():
                first, rows = same_size[0], slice(same_size[0].start, same_size[0].end)
                if len(same_size) > 1:
                    own_batches.append(self._batch(same_size, size, first_seen))
                elif first.before:
                    own_batches.append(OwnBatch(rows, None, keys=slice(first.start - first.before, first.end)))
                else:
                    mask = None if is_causal else self.mask_between(rows, rows, first_seen)
                    own_batches.append(OwnBatch(rows, mask))
            self._prepared[key] = PreparedParts(tuple(own_batches), parts.earlier, first_seen)
        return self._prepared[key]

    def calls(self, layer: AttentionLayer) -> tuple[VarlenCall, ...] | None:
        """Return the calls of the varlen kernel for `layer`; None if a part needs a mask."""
        key = (layer.past, block_bytes((layer.shape,)) // BLOCK_TOKENS)
        if key not in self._calls:
            self._calls[key] = varlen_calls(self.step, *key, self.device)
        return self._calls[key]

    def _batch(self, parts: list[OwnPart], filled: int, first_seen: torch.Tensor) -> OwnBatch:
        starts, ends = (np.asarray([getattr(own_part, name) for own_part in parts]) for name in ("start", "end"))
        positions = starts[:, None] + np.arange(filled)
        is_own = positions < ends[:, None]
        result_indices = np.flatnonzero(is_own)
        rows, is_token = self._on_device(np.where(is_own, positions, 0)), torch.from_numpy(is_own).to(self.device)
        mask = None
        if not parts[0].is_causal:
            mask = additive_mask(self._visible(rows, rows, first_seen) & is_token[:, None] & is_token[:, :, None])
        return OwnBatch(rows, mask, self._on_device(result_indices), self._on_device(positions.ravel()[result_indices]))

    def mask_between(self, rows: slice, keys: slice, first_seen: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [1, rows, keys] of the `keys` that each of `rows` sees."""
        query_positions, key_positions = (
            torch.arange(positions.start, positions.stop, device=self.device)[None] for positions in (rows, keys)
        )
        return additive_mask(self._visible(query_positions, key_positions, first_seen))

    def _visible(self, queries: torch.Tensor, keys: torch.Tensor, first_seen: torch.Tensor) -> torch.Tensor:
        """Return which tokens at `queries` [b, n] see which of `keys` [b, m], as [b, n, m]."""
        query, key = queries[:, :, None], keys[:, None]
        is_before = (key <= query) & (query < self.subtree_end[keys][:, None])
        return is_before & (self.depth[keys][:, None] >= first_seen[queries][:, :, None])

    def _on_device(self, numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.device)


_running: contextvars.ContextVar[RunningStep] = contextvars.ContextVar("moepass_running_step")


@contextlib.contextmanager
def running_step(step: RunningStep) -> Iterator[None]:
    """Let models that this thread calls in the block attend over `step`. Other threads have their own steps."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def the_running_step() -> RunningStep:
    """Return the step of this thread. Raises MoepassError if no step is running."""
    step = _running.get(None)
    if step is None:
        text = "the model's attention is `moepass_trie`, but no step is running: call it inside `running_step(...)`"
        raise MoepassError(text, name="running_step")
    return step
