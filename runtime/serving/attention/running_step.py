"""The running step: the data that the attention operator needs in addition to the tensors of the graph."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from moepass.models.errors import MoepassError
from moepass.models.formulas.attention import score_flops
from moepass.runtime.serving.attention.partial_attention import additive_mask
from moepass.runtime.serving.attention.survey import AttentionLayer
from moepass.runtime.serving.attention.trie_parts import EarlierPart, OwnPart, VisiblePast, trie_parts
from moepass.runtime.serving.attention.varlen_attention import VarlenCall, layer_obstacle, varlen_calls
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory, block_bytes
from moepass.runtime.system.joint_copies import upload

# [Empirical] Own parts up to this length run in batches, because launching their kernels takes as long as running them.
# From 48 tokens on, batches are slower than a call for each part.
BATCHED_TOKENS = 32
# [Empirical] Lengths to which the parts of a batch are padded. Coarser steps are not faster and compute more.
_FILLED = range(4, BATCHED_TOKENS + 1, 4)
# Limit of the rows of a batch, padding included, which bounds its copies of queries, keys and values.
BATCH_ROWS = 4096
# Limit of the bytes of masks that are held for a step. Further masks are computed for each layer.
HELD_MASK_BYTES = 64 << 20

# Layers share calls if the past and the bytes of a token are equal, and parts if the past and the FLOPs of a pair are.
_LayersKey = tuple[VisiblePast, int]


class OwnBatch(NamedTuple):
    """Own parts that are computed by one call.

    Attributes:
        rows: a slice of the stream, or indices [b, n] into it, padded with arbitrary rows.
        is_causal: whether each part is one sequence.
        mask: additive mask [b or 1, n, n]; None for causal attention.
        is_token: [b, n] whether a row is no padding; None for causal attention and slices.
        result_indices: indices of the results that belong to tokens, among the b · n results; None for all.
        positions: positions in the stream of these results.
        keys: a slice that ends with `rows`; None if keys and queries are the same tokens. With it, the mask is computed
            for each layer, because the masks of all such parts would take too much memory.
    """

    rows: slice | torch.Tensor
    is_causal: bool
    mask: torch.Tensor | None = None
    is_token: torch.Tensor | None = None
    result_indices: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    keys: slice | None = None


class PreparedParts(NamedTuple):
    """The parts of all layers in which tokens see the same past, with their masks and indices."""

    own: tuple[OwnBatch, ...]
    earlier: tuple[EarlierPart, ...]
    first_seen: torch.Tensor


class RunningStep:
    """A step on a device, with the model's attention `layers` by their index. `memory` is None without a cache.

    One copy uploads everything that the layers need, together with the tensors `inputs`.

    Raises MoepassError if the step uses blocks that `memory` does not have, or stores a block that it reads.
    """

    def __init__(
        self,
        step: StepBatch,
        layers: Mapping[int, AttentionLayer],
        memory: BlockMemory | None = None,
        device: torch.device | str = "cpu",
        inputs: tuple[torch.Tensor, ...] = (),
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
        self.context_tokens = [len(chain) * BLOCK_TOKENS for chain in step.contexts]
        for root in (node for node in step.nodes if node.parent < 0):
            assert step.depth[root.start] == (self.context_tokens[root.context] if root.context >= 0 else 0)
        in_stream = (_tensor(step.depth), _tensor(step.subtree_end))
        contexts = [_tensor(np.asarray(chain, np.int64)) for chain in step.contexts]
        stored = (
            _tensor(np.asarray([block.block for block in step.stored], np.int64)),
            _tensor(np.asarray([block.positions for block in step.stored], np.int64).reshape(-1, BLOCK_TOKENS)),
        )
        calls, parts = self._parts_of_layers()
        uploaded = upload((inputs, in_stream, contexts, stored, calls, parts), self.device)
        self.inputs, (self.depth, self.subtree_end), self.contexts, stored, self._calls, parts = uploaded
        self.stored_blocks, self.stored_positions = stored
        self._prepared = {key: self._with_masks(prepared) for key, prepared in parts.items()}

    def _parts_of_layers(
        self,
    ) -> tuple[dict[_LayersKey, tuple[VarlenCall, ...] | None], dict[_LayersKey, PreparedParts]]:
        """Return the calls and the parts, on the CPU, that the layers will ask for; none if the step runs on a CPU."""
        calls: dict[_LayersKey, tuple[VarlenCall, ...] | None] = {}
        parts: dict[_LayersKey, PreparedParts] = {}
        if self.device.type == "cpu":
            return calls, parts
        for layer in self.layers.values():
            calls_key = _calls_key(layer)
            takes_calls = self.device.type == "cuda" and not layer_obstacle(layer)
            if takes_calls and calls_key not in calls:
                calls[calls_key] = varlen_calls(self.step, *calls_key)
            if takes_calls and calls[calls_key] is not None:
                continue
            parts_key = _parts_key(layer)
            if parts_key not in parts:
                parts[parts_key] = self._host_parts(*parts_key)
        return calls, parts

    def layer(self, number: int) -> AttentionLayer:
        """Return the attention layer with the index `number`. Raises MoepassError if the model has no such layer."""
        if number not in self.layers:
            raise MoepassError(
                f"layer {number} called attention over a trie; the step was made for the layers {sorted(self.layers)}",
                name=f"layer {number}",
            )
        return self.layers[number]

    def prepared(self, layer: AttentionLayer) -> PreparedParts:
        """Return the parts for `layer`. On a CPU they are computed on the first call."""
        key = _parts_key(layer)
        if key not in self._prepared:
            self._prepared[key] = self._with_masks(upload(self._host_parts(*key), self.device))
        return self._prepared[key]

    def _host_parts(self, past: VisiblePast, pair_flops: int) -> PreparedParts:
        """Return parts without masks, on the CPU."""
        parts = trie_parts(self.step.nodes, self.step.depth, self.context_tokens, past, pair_flops)
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
                parts_at_once = BATCH_ROWS // size
                batched = range(0, len(same_size), parts_at_once)
                own_batches += [_batch(same_size[number : number + parts_at_once], size) for number in batched]
            elif first.before:
                own_batches.append(OwnBatch(rows, is_causal, keys=slice(first.start - first.before, first.end)))
            else:
                own_batches.append(OwnBatch(rows, is_causal))
        return PreparedParts(tuple(own_batches), parts.earlier, _tensor(past.first_seen(self.step.depth)))

    def _with_masks(self, parts: PreparedParts) -> PreparedParts:
        held_bytes = 0

        def with_mask(batch: OwnBatch) -> OwnBatch:
            nonlocal held_bytes
            if batch.is_causal or batch.keys is not None:
                return batch
            if isinstance(batch.rows, slice):
                held_bytes += 4 * (batch.rows.stop - batch.rows.start) ** 2
                if held_bytes > HELD_MASK_BYTES:
                    return batch._replace(keys=batch.rows)
                return batch._replace(mask=self.mask_between(batch.rows, batch.rows, parts.first_seen))
            assert batch.is_token is not None
            are_tokens = batch.is_token[:, None] & batch.is_token[:, :, None]
            return batch._replace(
                mask=additive_mask(self._visible(batch.rows, batch.rows, parts.first_seen) & are_tokens)
            )

        return parts._replace(own=tuple(map(with_mask, parts.own)))

    def calls(self, layer: AttentionLayer) -> tuple[VarlenCall, ...] | None:
        """Return the calls of the varlen kernel for `layer`; None if a part needs a mask."""
        key = _calls_key(layer)
        if key not in self._calls:
            self._calls[key] = upload(varlen_calls(self.step, *key), self.device)
        return self._calls[key]

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


def _batch(parts: list[OwnPart], filled: int) -> OwnBatch:
    starts, ends = (np.asarray([getattr(own_part, name) for own_part in parts]) for name in ("start", "end"))
    positions = starts[:, None] + np.arange(filled)
    is_own = positions < ends[:, None]
    result_indices = np.flatnonzero(is_own)
    return OwnBatch(
        _tensor(np.where(is_own, positions, 0)),
        parts[0].is_causal,
        is_token=None if parts[0].is_causal else torch.from_numpy(is_own),
        result_indices=_tensor(result_indices),
        positions=_tensor(positions.ravel()[result_indices]),
    )


def _calls_key(layer: AttentionLayer) -> _LayersKey:
    return layer.past, block_bytes((layer.shape,)) // BLOCK_TOKENS


def _parts_key(layer: AttentionLayer) -> _LayersKey:
    return layer.past, score_flops(1, layer.heads, layer.shape.key_dim, layer.shape.value_dim)


def _tensor(numbers: Indices) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, np.int64))


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
