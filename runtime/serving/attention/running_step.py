"""The running step: the data of a step that the attention operator needs in addition to the tensors of the graph.

A trie that was an argument of a captured graph would become part of it. So the graph contains only the index of the
layer, and the operator looks up the trie here.
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
from moepass.runtime.serving.attention.trie_parts import EarlierPart, OwnPart, VisiblePast, trie_parts
from moepass.runtime.serving.attention.varlen_parts import VarlenCall, varlen_calls
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory

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

    @property
    def pairs(self) -> int:
        """Number of computed pairs of a query and a key."""
        if self.keys is not None:
            assert isinstance(self.rows, slice)
            return int((self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start))
        count, tokens = (1, self.rows.stop - self.rows.start) if isinstance(self.rows, slice) else self.rows.shape
        return count * (tokens * (tokens + 1) // 2 if self.mask is None else tokens * tokens)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedParts:
    """The parts of all layers in which tokens see the same past, with their masks and indices."""

    own: tuple[OwnBatch, ...]
    earlier: tuple[EarlierPart, ...]
    first_seen: torch.Tensor

    @property
    def pairs(self) -> int:
        """Number of computed pairs of a query and a key, including masked and padded ones."""
        own_pairs = sum(batch.pairs for batch in self.own)
        return own_pairs + sum(
            (earlier.end - earlier.start) * (earlier.key_end - earlier.key_start) for earlier in self.earlier
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """A `VarlenCall` with its indices on a device."""

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCalls:
    """Calls of the varlen kernel, and the number of pairs that they compute."""

    calls: tuple[PreparedCall, ...]
    pairs: int


class RunningStep:
    """A step on a device.

    Args:
        step: the step.
        layers: attention layers of the model, by their index.
        memory: memory of the cache blocks; None without a cache.
        device: device of the model.

    Raises:
        InputError: the records of the step contradict each other, or do not fit the memory of blocks.
    """

    def __init__(
        self,
        step: StepBatch,
        layers: Mapping[int, AttentionLayer],
        memory: BlockMemory | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if memory is None and (step.contexts or step.stored):
            raise InputError(
                f"the step has {len(step.contexts)} contexts and {len(step.stored)} blocks to store, but the model has "
                "no memory of blocks",
                name="memory",
            )
        read = {block for chain in step.contexts for block in chain}
        written = [block.block for block in step.stored]
        if len(read | {*written}) < len(read) + len(written):
            raise InputError(
                f"the step stores the blocks {sorted(written)} and reads {sorted(read)}; it may store a block only "
                "once, and no block that it reads",
                name="stored",
                value=sorted(written),
            )
        count = 0 if memory is None else memory.count
        if outside := [block for block in (*read, *written) if not 0 <= block < count]:
            raise InputError(
                f"the step uses the blocks {sorted(outside)}; the memory has {count} blocks",
                name="block",
                value=sorted(outside),
                expected=range(count),
            )
        self.step, self.layers, self.memory, self.device = step, layers, memory, torch.device(device)
        self.depth = self._on_device(step.depth)
        self.subtree_end = self._on_device(step.subtree_end)
        self.contexts = [self._on_device(np.asarray(chain, np.int64)) for chain in step.contexts]
        self.context_tokens = [len(chain) * BLOCK_TOKENS for chain in step.contexts]
        self.stored_blocks = self._on_device(np.asarray([block.block for block in step.stored], np.int64))
        self.stored_positions = self._on_device(
            np.asarray([block.positions for block in step.stored], np.int64).reshape(-1, BLOCK_TOKENS)
        )
        # FLOPs of scores and of weighted values so far, over all layers.
        self.attention_flops = 0
        self._prepared: dict[tuple[VisiblePast, int], PreparedParts] = {}
        self._calls: dict[VisiblePast, PreparedCalls | None] = {}
        for number, node in enumerate(step.nodes):
            before = self.context_tokens[node.context] if node.context >= 0 else 0
            if node.parent < 0 and step.depth[node.start] != before:
                raise InputError(
                    f"node {number} begins at depth {step.depth[node.start]} after {before} cached tokens",
                    name=f"node {number}",
                    value=int(step.depth[node.start]),
                    expected=before,
                )

    def layer(self, number: int) -> AttentionLayer:
        """Return the attention layer with the index `number`.

        Raises:
            MoepassError: the model has no such layer.
        """
        layer = self.layers.get(number)
        if layer is None:
            raise MoepassError(
                f"layer {number} called attention over a trie; the step was made for the layers {sorted(self.layers)}",
                name=f"layer {number}",
                value=number,
                expected=sorted(self.layers),
            )
        return layer

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
            own_batches = tuple(
                self._single(same_size[0], first_seen)
                if len(same_size) == 1
                else self._batch(same_size, size, first_seen)
                for (size, _), same_size in batches.items()
            )
            self._prepared[key] = PreparedParts(own_batches, parts.earlier, first_seen)
        return self._prepared[key]

    def calls(self, past: VisiblePast) -> PreparedCalls | None:
        """Return the calls of the varlen kernel for layers in which tokens see `past`; None if a part needs a mask."""
        if past not in self._calls:
            parts = trie_parts(self.step.nodes, self.step.depth, self.context_tokens, past, parts_are_free=True)
            calls = varlen_calls(parts, self.context_tokens, self.step.count)
            self._calls[past] = (
                None
                if calls is None
                else PreparedCalls(
                    tuple(self._prepared_call(call) for call in calls), sum(call.pairs for call in calls)
                )
            )
        return self._calls[past]

    def _prepared_call(self, call: VarlenCall) -> PreparedCall:
        queries, keys = (None if rows is None else self._on_device(rows) for rows in (call.queries, call.keys))
        query_ends, key_ends = (torch.from_numpy(ends).to(self.device) for ends in (call.query_ends, call.key_ends))
        return PreparedCall(queries, keys, query_ends, key_ends, call.most_queries, call.most_keys)

    def _single(self, part: OwnPart, first_seen: torch.Tensor) -> OwnBatch:
        if part.before:
            return OwnBatch(slice(part.start, part.end), None, keys=slice(part.start - part.before, part.end))
        places = torch.arange(part.start, part.end, device=self.device)[None]
        mask = None if part.is_causal else additive_mask(self._visible(places, first_seen))
        return OwnBatch(slice(part.start, part.end), mask)

    def _batch(self, parts: list[OwnPart], filled: int, first_seen: torch.Tensor) -> OwnBatch:
        starts, ends = (np.asarray([getattr(own_part, name) for own_part in parts]) for name in ("start", "end"))
        positions = starts[:, None] + np.arange(filled)
        is_own = positions < ends[:, None]
        result_indices = np.flatnonzero(is_own)
        rows, is_token = self._on_device(np.where(is_own, positions, 0)), torch.from_numpy(is_own).to(self.device)
        mask = None
        if not parts[0].is_causal:
            mask = additive_mask(self._visible(rows, first_seen) & is_token[:, None] & is_token[:, :, None])
        return OwnBatch(rows, mask, self._on_device(result_indices), self._on_device(positions.ravel()[result_indices]))

    def mask_between(self, rows: slice, keys: slice, first_seen: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [1, rows, keys] of the `keys` that each of `rows` sees."""
        query_positions, key_positions = (
            torch.arange(positions.start, positions.stop, device=self.device)[None] for positions in (rows, keys)
        )
        return additive_mask(self._visible(query_positions, first_seen, key_positions))

    def _visible(
        self, places: torch.Tensor, first_seen: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return which tokens at `places` [b, n] see which of `keys` [b, m], as [b, n, m]; by default each other."""
        keys = places if keys is None else keys
        query, key = places[:, :, None], keys[:, None]
        is_before = (key <= query) & (query < self.subtree_end[keys][:, None])
        return is_before & (self.depth[keys][:, None] >= first_seen[places][:, :, None])

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
    """Return the step of this thread.

    Raises:
        MoepassError: no step is running.
    """
    step = _running.get(None)
    if step is None:
        raise MoepassError(
            "the model's attention is `moepass_trie`, but no step is running: call it inside `running_step(...)`",
            name="running_step",
        )
    return step
