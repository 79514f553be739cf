"""The index of the cache: which block holds which tokens, which blocks to keep, and which to evict.

    with index.lease() as lease:
        packed = pack(requests, table, [lease.match(hashes) for hashes in hashes_of_requests])
        batch = packed.storing(lease.reserve(packed.offered))
        ...                                      # run the step, write scores
        lease.commit()

Matched and reserved blocks are pinned until the lease ends. Reserved blocks are exclusive, and no other step can match
them before `commit`. A lease that ends without `commit`, for example because of an exception, frees them.

A block is kept if several requests or several branches of its step share it, or if it was offered or kept before, as
far as the index remembers. A block that was offered once and is not shared is never kept. A block is only kept after
the block before it, and only evicted after all later ones: among the blocks without a kept successor and without a
lease, the least recently matched or stored one is evicted first.
"""

from __future__ import annotations

import collections
import heapq
from typing import Literal

import numpy as np
import numpy.typing as npt

from moepass.runtime.serving.batching.block_hashes import MatchedBlocks, OfferedBlocks, RequestHashes
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS, Indices
from moepass.runtime.serving.requests.answer import ScoredTokens

# [Empirical] Number of remembered hashes of blocks that were offered once. Each takes about 100 bytes.
RECENT_HASHES = 1 << 16


class BlockScores:
    """The log-probability of each token of each block, and the most likely token with its log-probability.

    So prompt log-probabilities of a cached prefix need no computation.

    Scores are addressed by cache slot. A slot is known once all three values have been written.
    """

    def __init__(self, block_count: int) -> None:
        slots = block_count * BLOCK_TOKENS
        self._known = np.zeros(slots, bool)
        self._log_probabilities = np.zeros(slots, np.float32)
        self._top_tokens = np.zeros(slots, np.int32)
        self._top_log_probabilities = np.zeros(slots, np.float32)

    def known(self, blocks: Indices) -> npt.NDArray[np.bool_]:
        """Return which tokens [blocks, BLOCK_TOKENS] are known; none for block -1."""
        if not len(self._known):
            return np.zeros((len(blocks), BLOCK_TOKENS), bool)
        known: npt.NDArray[np.bool_] = self._known.reshape(-1, BLOCK_TOKENS)[blocks] & (blocks >= 0)[:, None]
        return known

    def write(self, slots: Indices, scored: ScoredTokens) -> None:
        """Write `scored` to `slots`; -1 skips a token. `scored` must include the most likely token of each position.

        Known scores stay, so that answers from the cache do not change as long as the block exists.
        """
        chosen = np.flatnonzero(slots >= 0)
        chosen = chosen[~self._known[slots[chosen]]]
        written_slots = slots[chosen]
        self._log_probabilities[written_slots] = scored.log_probabilities[chosen]
        self._top_tokens[written_slots] = scored.top_tokens[chosen, 0]
        self._top_log_probabilities[written_slots] = scored.top_log_probabilities[chosen, 0]
        self._known[written_slots] = True

    def read(self, slots: Indices) -> ScoredTokens:
        """Return the scores of `slots`, with one most likely token each."""
        assert self._known[slots].all(), "a slot of the cache stores no score"
        tops = self._top_tokens[slots, None], self._top_log_probabilities[slots, None]
        return ScoredTokens(self._log_probabilities[slots], *tops)

    def forget(self, block: int) -> None:
        """Mark the scores of `block` as unknown, because it gets other tokens."""
        self._known[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = False


class BlockIndex:
    """The index of `block_count` blocks. 0 blocks switch the cache off: it matches, remembers and keeps nothing.

    Steps may overlap, but calls must come from one thread at a time.
    """

    def __init__(self, block_count: int, recent_hashes: int = RECENT_HASHES) -> None:
        self.block_count = block_count
        self.scores = BlockScores(block_count)
        self._blocks: dict[bytes, int] = {}
        self._pending: set[bytes] = set()
        self._recent: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._most_recent = recent_hashes
        self._events: dict[bytes, Literal["stored", "evicted"]] = {}
        self._free = list(reversed(range(block_count)))
        # One entry per block.
        self._hashes = [b""] * block_count
        self._previous = [-1] * block_count
        self._children = [0] * block_count
        self._pins = [0] * block_count
        self._last_uses = [0] * block_count
        # Evictable blocks by last use. Entries may be outdated: they are checked when they are popped.
        self._queue: list[tuple[int, int]] = []
        self._is_queued = [False] * block_count
        self._now = 0

    def __len__(self) -> int:
        """Return the number of blocks in the index."""
        return len(self._blocks)

    @property
    def used(self) -> int:
        """Number of blocks that a lease pins."""
        return len(self._pins) - self._pins.count(0)

    def lease(self) -> StepLease:
        """Return a lease for one step."""
        self._now += 1
        return StepLease(self)

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks that no lease pins, and return how many were evicted."""
        evicted = 0
        while evicted < count and (block := self._evict_one()) is not None:
            self._free.append(block)
            evicted += 1
        return evicted

    def drain_events(self) -> dict[bytes, Literal["stored", "evicted"]]:
        """Return the last change of each hash since the last call, in order."""
        events, self._events = self._events, {}
        return events

    def _remember(self, name: bytes) -> None:
        if self.block_count:
            self._recent[name] = None
            self._recent.move_to_end(name)
            if len(self._recent) > self._most_recent:
                self._recent.popitem(last=False)

    def _note(self, kind: Literal["stored", "evicted"], name: bytes) -> None:
        self._events.pop(name, None)
        self._events[name] = kind

    def _evict_one(self) -> int | None:
        """Remove a block from the index and return it; None if all blocks are in use."""
        while self._queue:
            used, block = heapq.heappop(self._queue)
            self._is_queued[block] = False
            if not self._is_evictable(block):
                continue
            if used != self._last_uses[block]:
                self._queue_if_idle(block)
                continue
            name = self._hashes[block]
            del self._blocks[name]
            self._remember(name)
            self._note("evicted", name)
            self._drop(block)
            return block
        return None

    def _is_evictable(self, block: int) -> bool:
        is_stored = self._blocks.get(self._hashes[block]) == block
        return is_stored and not self._pins[block] and not self._children[block]

    def _queue_if_idle(self, block: int) -> None:
        if self._is_evictable(block) and not self._is_queued[block]:
            self._is_queued[block] = True
            heapq.heappush(self._queue, (self._last_uses[block], block))

    def _drop(self, block: int) -> None:
        """Clear `block`, so that the block before it may be evicted."""
        previous = self._previous[block]
        self._hashes[block], self._previous[block] = b"", -1
        if previous >= 0:
            self._children[previous] -= 1
            self._queue_if_idle(previous)

    def _unpin(self, block: int) -> None:
        self._pins[block] -= 1
        self._queue_if_idle(block)

    def _reserve(self, offered: OfferedBlocks) -> tuple[dict[bytes, int], list[bytes]]:
        """Return the new blocks by hash, pinned, and the hashes that got no block."""
        reserved: dict[bytes, int] = {}
        rejected: list[bytes] = []
        shared = ((offered.requests > 1) | (offered.branches > 1)).tolist()
        for name, before, is_shared in zip(offered.hashes, offered.previous, shared, strict=True):
            if name in self._blocks or name in self._pending:
                continue
            previous = -1 if before is None else reserved.get(before, self._blocks.get(before, -1))
            has_previous = before is None or previous >= 0
            block: int | None = None
            if has_previous and (is_shared or name in self._recent):
                block = self._free.pop() if self._free else self._evict_one()
            if block is None:
                rejected.append(name)
                continue
            self.scores.forget(block)
            self._hashes[block], self._previous[block] = name, previous
            if previous >= 0:
                self._children[previous] += 1
            self._pins[block] += 1
            self._pending.add(name)
            reserved[name] = block
        return reserved, rejected


class StepLease:
    """The blocks that one step uses."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._pinned: set[int] = set()
        self._reserved: dict[bytes, int] = {}
        self._rejected: list[bytes] = []
        self._is_over = False

    def match(self, hashes: RequestHashes) -> MatchedBlocks:
        """Return and pin the cached blocks of a request: for each sequence the blocks before the first missing one."""
        assert not self._is_over
        index = self._index
        # No block is kept without those before it, so the cached blocks of each sequence are a prefix of it.
        blocks = np.array([index._blocks.get(name, -1) for name in hashes.hashes], np.int64)
        for block in set(blocks.tolist()) - {-1}:
            index._last_uses[block] = index._now
            if block not in self._pinned:
                index._pins[block] += 1
                self._pinned.add(block)
        return MatchedBlocks(hashes, blocks, index.scores.known(blocks))

    def reserve(self, offered: OfferedBlocks) -> Indices:
        """Return for each offered block the cache block to store it in; -1 if it is not kept or the cache is full."""
        assert not self._is_over
        reserved, rejected = self._index._reserve(offered)
        self._reserved |= reserved
        self._rejected += rejected
        return np.array([reserved.get(name, -1) for name in offered.hashes], np.int64)

    def commit(self) -> None:
        """End the lease after the step has run. Later leases match its reserved blocks."""
        assert not self._is_over
        self._is_over = True
        index = self._index
        for name, block in self._reserved.items():
            index._pending.remove(name)
            index._blocks[name] = block
            index._last_uses[block] = index._now
            index._recent.pop(name, None)
            index._note("stored", name)
        # The beginnings of sequences are remembered last, so they are forgotten last.
        for name in reversed(self._rejected):
            index._remember(name)
        for block in (*self._pinned, *self._reserved.values()):
            index._unpin(block)

    def release(self) -> None:
        """End the lease of a step that did not run or failed, and free its reserved blocks."""
        assert not self._is_over
        self._is_over = True
        index = self._index
        for name, block in self._reserved.items():
            index._pending.remove(name)
            index._pins[block] -= 1
            index._drop(block)
            index._free.append(block)
        for block in self._pinned:
            index._unpin(block)

    def __enter__(self) -> StepLease:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_over:
            self.release()
