"""Which block of the cache holds what, which blocks are worth keeping, and which one goes when there is no room.

    with index.lease() as lease:
        packed = pack(requests, table, [lease.match(hashes) for hashes in hashes_of_requests])
        batch = packed.storing(lease.reserve(packed.offered))
        ...                                      # run the step, write scores
        lease.commit()

What a lease has matched or reserved stays until it ends. Reserved blocks are nobody else's and are found by nobody
before `commit`; a lease that ends without it, such as by an exception, leaves none of them behind.

A block pays, and is kept, if several requests or several branches of its step share it, or if it was offered or
kept before, as far as the index remembers. What came once and nobody shares is never kept. A block is only kept
behind the one before it, and only evicted after all those behind it: of the blocks that nobody stands behind and no
lease holds, the one that was matched or stored longest ago goes first.
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

# [Empirical] Hashes of blocks that came once. Each takes some 100 bytes.
RECENT_HASHES = 1 << 16


class BlockEvent(NamedTuple):
    kind: Literal["stored", "evicted"]
    hash: bytes


class BlockIndex:
    """The index of `block_count` blocks; with 0 the cache is off: nothing is found, remembered or kept.

    Steps may overlap, but calls may not: one thread at a time.

    scores      what lies beside the blocks' tokens

    Raises InputError for a negative number.
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
        # Per block.
        self._hashes = [b""] * block_count
        self._previous = [-1] * block_count
        self._children = [0] * block_count
        self._pins = [0] * block_count
        self._last_uses = [0] * block_count
        # Blocks that may be evicted, by when they were used; those that may not any more are still among them.
        self._queue: list[tuple[int, int]] = []
        self._is_queued = [False] * block_count
        self._now = 0

    def __len__(self) -> int:
        """Blocks that are found."""
        return len(self._blocks)

    @property
    def used(self) -> int:
        """Blocks that a lease holds."""
        return len(self._pins) - self._pins.count(0)

    def lease(self) -> StepLease:
        self._now += 1
        return StepLease(self)

    def evict(self, count: int) -> int:
        """Give up to `count` blocks back that no lease holds. Returns how many it were."""
        evicted = 0
        while evicted < count and (block := self._evicted()) is not None:
            self._free.append(block)
            evicted += 1
        return evicted

    def drain_events(self) -> list[BlockEvent]:
        """What became of blocks since the last call, in order; of each hash the last event only."""
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

    def _evicted(self) -> int | None:
        """A block that was taken out of the index; None where all are held."""
        while self._queue:
            used, block = heapq.heappop(self._queue)
            self._is_queued[block] = False
            if not self._may_go(block):
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

    def _may_go(self, block: int) -> bool:
        is_stored = self._blocks.get(self._hashes[block]) == block
        return is_stored and not self._pins[block] and not self._children[block]

    def _queue_if_idle(self, block: int) -> None:
        if self._may_go(block) and not self._is_queued[block]:
            self._is_queued[block] = True
            heapq.heappush(self._queue, (self._last_uses[block], block))

    def _drop(self, block: int) -> None:
        """Forget what `block` holds, so that the one before it may go next."""
        previous = self._previous[block]
        self._hashes[block], self._previous[block] = b"", -1
        if previous >= 0:
            self._children[previous] -= 1
            self._queue_if_idle(previous)

    def _match(self, hashes: RequestHashes) -> list[int]:
        # No block is kept without those before it, so of each sequence this finds a beginning.
        found = [self._blocks.get(name, -1) for name in hashes.hashes]
        for block in set(found):
            if block >= 0:
                self._last_uses[block] = self._now
        return found

    def _pin(self, block: int) -> None:
        self._pins[block] += 1

    def _unpin(self, block: int) -> None:
        self._pins[block] -= 1
        self._queue_if_idle(block)

    def _reserve(self, offered: OfferedBlocks) -> tuple[dict[bytes, int], list[bytes]]:
        """The new blocks by hash, pinned, each behind the one before it; and the hashes that got none."""
        reserved: dict[bytes, int] = {}
        left: list[bytes] = []
        shared = ((offered.requests > 1) | (offered.branches > 1)).tolist()
        for name, before, is_shared in zip(offered.hashes, offered.previous, shared, strict=True):
            if name in self._blocks or name in self._pending:
                continue
            previous = -1 if before is None else reserved.get(before, self._blocks.get(before, -1))
            has_place = before is None or previous >= 0
            block = self._taken() if has_place and (is_shared or name in self._recent) else None
            if block is None:
                left.append(name)
                continue
            self.scores.forget(block)
            self._hashes[block], self._previous[block] = name, previous
            if previous >= 0:
                self._children[previous] += 1
            self._pin(block)
            self._pending.add(name)
            reserved[name] = block
        return reserved, left

    def _taken(self) -> int | None:
        return self._free.pop() if self._free else self._evicted()

    def _commit(self, reserved: dict[bytes, int], left: list[bytes]) -> None:
        for name, block in reserved.items():
            self._pending.remove(name)
            self._blocks[name] = block
            self._last_uses[block] = self._now
            self._recent.pop(name, None)
            self._note("stored", name)
        # The beginnings of sequences last: they are forgotten last.
        for name in reversed(left):
            self._remember(name)

    def _give_back(self, reserved: dict[bytes, int]) -> None:
        for name, block in reserved.items():
            self._pending.remove(name)
            self._pins[block] -= 1
            self._drop(block)
            self._free.append(block)


class StepLease:
    """What one step uses of the cache. Raises MoepassError where it is used after its end."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._pinned: set[int] = set()
        self._reserved: dict[bytes, int] = {}
        self._left: list[bytes] = []
        self._is_over = False

    def match(self, hashes: RequestHashes) -> MatchedBlocks:
        """What the cache holds of a request: of each sequence the blocks up to the first that it does not hold."""
        self._check()
        found = self._index._match(hashes)
        for block in set(found) - self._pinned - {-1}:
            self._index._pin(block)
            self._pinned.add(block)
        blocks = np.array(found, np.int64)
        return MatchedBlocks(hashes, blocks, self._index.scores.known(blocks))

    def reserve(self, offered: OfferedBlocks) -> Indices:
        """[offered] the blocks to store those in that pay, -1 for the others and where there is no room."""
        self._check()
        reserved, left = self._index._reserve(offered)
        self._reserved |= reserved
        self._left += left
        return np.array([reserved.get(name, -1) for name in offered.hashes], np.int64)

    def commit(self) -> None:
        """The step has run: its blocks are found from now on."""
        self._check()
        self._is_over = True
        self._index._commit(self._reserved, self._left)
        for block in (*self._pinned, *self._reserved.values()):
            self._index._unpin(block)

    def release(self) -> None:
        """The step has not run, or failed: its blocks hold nothing."""
        self._check()
        self._is_over = True
        self._index._give_back(self._reserved)
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
            raise MoepassError("this lease of the cache is over", name="lease", expected="a new lease for each step")
