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
from moepass.runtime.serving.attention.trie_parts import EarlierPart, OwnPart, VisiblePast, trie_parts
from moepass.runtime.serving.attention.varlen_parts import VarlenCall, varlen_calls
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, StepBatch
from moepass.runtime.serving.cache.block_memory import BlockMemory

# Own parts up to this length run in batches, because starting their kernels takes as long as they run. [Empirical] From
# 48 tokens on batches are slower than a call for each part.
BATCHED_TOKENS = 32
# To how many tokens parts of a batch are filled up. [Empirical] Coarser steps are not faster and compute more.
_FILLED = range(4, BATCHED_TOKENS + 1, 4)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OwnBatch:
    """Own parts that one call computes: a slice of the stream, or rows [b, n] of it, filled up with any rows.

    Of the b · n results, in this order, `kept` belong to the tokens `places`. `mask` [b or 1, n, n], or None: causal.
    With `keys` a slice meets these, which begin before it, and the mask is made for each layer anew: those of all such
    parts would be too large to keep.
    """

    rows: slice | torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | None = None
    places: torch.Tensor | None = None
    keys: slice | None = None

    @property
    def pairs(self) -> int:
        if self.keys is not None:
            assert isinstance(self.rows, slice)
            return int((self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start))
        count, tokens = (1, self.rows.stop - self.rows.start) if isinstance(self.rows, slice) else self.rows.shape
        return count * (tokens * (tokens + 1) // 2 if self.mask is None else tokens * tokens)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedParts:
    """Parts for all layers in which tokens see the same of their past, with masks and indices made once."""

    own: tuple[OwnBatch, ...]
    earlier: tuple[EarlierPart, ...]
    first_seen: torch.Tensor

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed, also those that a mask hides or that fill up a batch."""
        own = sum(one.pairs for one in self.own)
        return own + sum((part.end - part.start) * (part.key_end - part.key_start) for part in self.earlier)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """A `VarlenCall` on a device."""

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    most_queries: int
    most_keys: int


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCalls:
    calls: tuple[PreparedCall, ...]
    pairs: int


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
        read = {block for chain in step.contexts for block in chain}
        written = [one.block for one in step.stored]
        if len(read | {*written}) < len(read) + len(written):
            raise InputError(
                f"blocks {sorted(written)} are to be stored and {sorted(read)} to be read: a step stores a block once, "
                "and none that it reads",
                name="stored",
                value=sorted(written),
            )
        count = 0 if memory is None else memory.count
        if outside := [block for block in (*read, *written) if not 0 <= block < count]:
            raise InputError(
                f"the step names the blocks {sorted(outside)}; the memory has {count}",
                name="block",
                value=sorted(outside),
                expected=range(count),
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
        # FLOPs of scores and of weighted values that have run so far, over all layers.
        self.attention_flops = 0
        self._prepared: dict[tuple[VisiblePast, int], PreparedParts] = {}
        self._calls: dict[VisiblePast, PreparedCalls | None] = {}
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
            batches: dict[tuple[int, bool], list[OwnPart]] = {}
            for number, part in enumerate(parts.own):
                tokens = part.end - part.start
                # Long parts stand alone.
                filled = -number if part.before else next((size for size in _FILLED if size >= tokens), -number)
                batches.setdefault((filled, part.is_causal), []).append(part)
            own = tuple(
                self._one(batch[0], first_seen) if len(batch) == 1 else self._batch(batch, filled, first_seen)
                for (filled, _), batch in batches.items()
            )
            self._prepared[key] = PreparedParts(own, parts.earlier, first_seen)
        return self._prepared[key]

    def calls(self, past: VisiblePast) -> PreparedCalls | None:
        """The same for a kernel that takes many parts at once; None where a part needs a mask."""
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

    def _one(self, part: OwnPart, first_seen: torch.Tensor) -> OwnBatch:
        if part.before:
            return OwnBatch(slice(part.start, part.end), None, keys=slice(part.start - part.before, part.end))
        places = torch.arange(part.start, part.end, device=self.device)[None]
        mask = None if part.is_causal else additive_mask(self._visible(places, first_seen))
        return OwnBatch(slice(part.start, part.end), mask)

    def _batch(self, parts: list[OwnPart], filled: int, first_seen: torch.Tensor) -> OwnBatch:
        starts, ends = (np.asarray([getattr(part, name) for part in parts]) for name in ("start", "end"))
        places = starts[:, None] + np.arange(filled)
        is_own = places < ends[:, None]
        kept = np.flatnonzero(is_own)
        rows, own = self._on_device(np.where(is_own, places, 0)), torch.from_numpy(is_own).to(self.device)
        mask = None
        if not parts[0].is_causal:
            mask = additive_mask(self._visible(rows, first_seen) & own[:, None] & own[:, :, None])
        return OwnBatch(rows, mask, self._on_device(kept), self._on_device(places.ravel()[kept]))

    def mask_between(self, rows: slice, keys: slice, first_seen: torch.Tensor) -> torch.Tensor:
        """Which of `keys` each of `rows` sees, as an additive mask [1, rows, keys]."""
        queries, others = (torch.arange(one.start, one.stop, device=self.device)[None] for one in (rows, keys))
        return additive_mask(self._visible(queries, first_seen, others))

    def _visible(
        self, places: torch.Tensor, first_seen: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which tokens at `places` [b, n] see which of the same row, or of `keys` [b, m], [b, n, m]."""
        keys = places if keys is None else keys
        query, key = places[:, :, None], keys[:, None]
        is_before = (key <= query) & (query < self.subtree_end[keys][:, None])
        return is_before & (self.depth[keys][:, None] >= first_seen[places][:, :, None])

    def _on_device(self, numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self.device)


_running: contextvars.ContextVar[RunningStep] = contextvars.ContextVar("moepass_running_step")


@contextlib.contextmanager
def running_step(step: RunningStep) -> Iterator[None]:
    """Attention of a model that this thread calls in this block is that of `step`. Other threads have their own."""
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
