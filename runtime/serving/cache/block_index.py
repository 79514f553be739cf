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
import types
from typing import Literal, NamedTuple

import numpy as np

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.serving.batching.block_hashes import RequestHashes
from moepass.runtime.serving.batching.cached_blocks import MatchedBlocks, OfferedBlocks
from moepass.runtime.serving.batching.step_batch import Indices
from moepass.runtime.serving.cache.block_scores import BlockScores

# [Empirical] Number of remembered hashes of blocks that were offered once. Each takes about 100 bytes.
RECENT_HASHES = 1 << 16


class BlockEvent(NamedTuple):
    """A change of the index: a block was stored or evicted."""

    kind: Literal["stored", "evicted"]
    hash: bytes


class BlockIndex:
    """The index of `block_count` blocks. 0 blocks switch the cache off: it matches, remembers and keeps nothing.

    Steps may overlap, but calls must come from one thread at a time.

    Attributes:
        block_count: number of blocks.
        scores: the scores of the blocks' tokens.

    Raises:
        InputError: a number is negative.
    """

    def __init__(self, block_count: int, recent_hashes: int = RECENT_HASHES) -> None:
        for name, value in (("block_count", block_count), ("recent_hashes", recent_hashes)):
            if value < 0:
                raise InputError.wrong(name, value, "0 or more")
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

    def drain_events(self) -> list[BlockEvent]:
        """Return the changes since the last call, in order; only the last event of each hash."""
        events = [BlockEvent(kind, name) for name, kind in self._events.items()]
        self._events.clear()
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

    def _match(self, hashes: RequestHashes) -> list[int]:
        # No block is kept without those before it, so the cached blocks of each sequence are a prefix of it.
        blocks = [self._blocks.get(name, -1) for name in hashes.hashes]
        for block in set(blocks):
            if block >= 0:
                self._last_uses[block] = self._now
        return blocks

    def _pin(self, block: int) -> None:
        self._pins[block] += 1

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
            block = self._free_block() if has_previous and (is_shared or name in self._recent) else None
            if block is None:
                rejected.append(name)
                continue
            self.scores.forget(block)
            self._hashes[block], self._previous[block] = name, previous
            if previous >= 0:
                self._children[previous] += 1
            self._pin(block)
            self._pending.add(name)
            reserved[name] = block
        return reserved, rejected

    def _free_block(self) -> int | None:
        return self._free.pop() if self._free else self._evict_one()

    def _commit(self, reserved: dict[bytes, int], rejected: list[bytes]) -> None:
        for name, block in reserved.items():
            self._pending.remove(name)
            self._blocks[name] = block
            self._last_uses[block] = self._now
            self._recent.pop(name, None)
            self._note("stored", name)
        # The beginnings of sequences are remembered last, so they are forgotten last.
        for name in reversed(rejected):
            self._remember(name)

    def _discard(self, reserved: dict[bytes, int]) -> None:
        for name, block in reserved.items():
            self._pending.remove(name)
            self._pins[block] -= 1
            self._drop(block)
            self._free.append(block)


class StepLease:
    """The blocks that one step uses.

    Raises:
        MoepassError: the lease is used after its end.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._pinned: set[int] = set()
        self._reserved: dict[bytes, int] = {}
        self._rejected: list[bytes] = []
        self._is_over = False

    def match(self, hashes: RequestHashes) -> MatchedBlocks:
        """Return and pin the cached blocks of a request: for each sequence the blocks before the first missing one."""
        self._check()
        cached_blocks = self._index._match(hashes)
        for block in set(cached_blocks) - self._pinned - {-1}:
            self._index._pin(block)
            self._pinned.add(block)
        blocks = np.array(cached_blocks, np.int64)
        return MatchedBlocks(hashes, blocks, self._index.scores.known(blocks))

    def reserve(self, offered: OfferedBlocks) -> Indices:
        """Return for each offered block the cache block to store it in; -1 if it is not kept or the cache is full."""
        self._check()
        reserved, rejected = self._index._reserve(offered)
        self._reserved |= reserved
        self._rejected += rejected
        return np.array([reserved.get(name, -1) for name in offered.hashes], np.int64)

    def commit(self) -> None:
        """End the lease after the step has run. Later leases match its reserved blocks."""
        self._check()
        self._is_over = True
        self._index._commit(self._reserved, self._rejected)
        for block in (*self._pinned, *self._reserved.values()):
            self._index._unpin(block)

    def release(self) -> None:
        """End the lease of a step that did not run or failed, and free its reserved blocks."""
        self._check()
        self._is_over = True
        self._index._discard(self._reserved)
        for block in self._pinned:
            self._index._unpin(block)

    def __enter__(self) -> StepLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if not self._is_over:
            self.release()

    def _check(self) -> None:
        if self._is_over:
            raise MoepassError(
                "this lease of the cache has ended; take a new lease for each step",
                name="lease",
                expected="a new lease for each step",
            )
