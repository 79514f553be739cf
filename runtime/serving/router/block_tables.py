"""Tables of the prefix blocks that each rank holds (committed), or will hold once its assigned requests run (pending).

Sets of ranks are bit masks. A dict maps hashes of committed blocks to masks. A rank that holds a block also holds all
blocks before it: without them a cache cannot use it. So bisection finds how much of a prompt a rank holds. Pending
blocks form a radix tree: a run of blocks that the same prompts share is one node, so a prompt of a thousand unshared
blocks costs as little as a prompt of ten. A hash covers everything before it, so the first hash of a node identifies
it, and two prompts that differ in one block differ in all later ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moepass.runtime.serving.router.routable import BlockHash

# Bits of a count, enough for the requests that a rank can have at a time.
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1


@dataclasses.dataclass(eq=False, slots=True)
class PendingRun:
    """Blocks [start, end) of a prompt that at least one assigned request brings in full.

    Attributes:
        parent: the run before it, None if the prompt begins with it.
        counts: number of such requests of each rank, in `_COUNT_BITS` bits per rank. One integer takes far less memory
            than a dictionary, and nearly every request has a run.
        ranks: bit mask of the ranks with a count above 0.
    """

    blocks: Sequence[BlockHash]
    start: int
    end: int
    parent: PendingRun | None
    counts: int
    ranks: int


class BlockTables:
    """Committed and pending blocks of all ranks. `committed` has the mask of ranks of each block."""

    def __init__(self) -> None:
        self.committed: dict[BlockHash, int] = {}
        self._runs: dict[BlockHash, PendingRun] = {}  # by their first block

    def store(self, rank: int, block: BlockHash) -> None:
        """Record that `rank` holds `block`."""
        self.committed[block] = self.committed.get(block, 0) | 1 << rank

    def evict(self, rank: int, block: BlockHash) -> None:
        """Record that `rank` no longer holds `block`."""
        ranks = self.committed.get(block, 0) & ~(1 << rank)
        if ranks:
            self.committed[block] = ranks
        else:
            self.committed.pop(block, None)

    def forget(self, rank: int) -> None:
        """Remove all committed blocks of `rank`."""
        mask = ~(1 << rank)
        self.committed = {block: remaining for block, ranks in self.committed.items() if (remaining := ranks & mask)}

    @property
    def pending(self) -> dict[BlockHash, dict[int, int]]:
        """A copy of the number of assigned requests of each rank that bring each pending block."""
        return {
            block: {rank: run.counts >> rank * _COUNT_BITS & _COUNT_MASK for rank in set_bits(run.ranks)}
            for run in self._runs.values()
            for block in run.blocks[run.start : run.end]
        }

    def longest_match(self, blocks: Sequence[BlockHash], ranks: int) -> tuple[int, int]:
        """Return the ranks with the most leading `blocks`, committed or pending, and the number of these blocks.

        Only ranks in the mask `ranks` count. All of them are returned for a match of 0 blocks.
        """
        if not blocks:
            return ranks, 0
        holders, depth = ranks, 0
        run = self._runs.get(blocks[0])
        while run is not None and (pending_ranks := run.ranks & ranks):
            holders = pending_ranks
            depth = _shared_end(run, blocks)
            if depth < run.end or depth == len(blocks):
                break
            run = self._runs.get(blocks[depth])
        # A rank that holds a block holds all before it, so only committed blocks at this depth or deeper matter.
        committed = self.committed.get
        if depth < len(blocks) and (held := committed(blocks[depth], 0) & ranks):
            return self._longest_committed_match(blocks, ranks, depth + 1, held)
        return (holders | committed(blocks[depth - 1], 0) & ranks if depth else holders), depth

    def _longest_committed_match(
        self, blocks: Sequence[BlockHash], ranks: int, depth: int, held: int
    ) -> tuple[int, int]:
        """Return the longest match among committed blocks, if the ranks `held` hold the first `depth` blocks."""
        committed = self.committed.get
        step = 1
        missing = len(blocks) + 1  # the smallest number of blocks known to be held by no rank
        while depth + 1 < missing:
            middle = min(depth + step, (depth + missing) // 2)
            more = committed(blocks[middle - 1], 0) & ranks
            if more:
                depth, held = middle, more
                step *= 2
            else:
                missing = middle
        return held, depth

    def promise(self, blocks: Sequence[BlockHash], rank: int) -> PendingRun | None:
        """Record `blocks` as pending on `rank` until `release` is called with the returned run, None without blocks."""
        runs = self._runs
        bit = 1 << rank
        increment = 1 << rank * _COUNT_BITS
        count = len(blocks)
        depth = 0
        last: PendingRun | None = None
        while depth < count:
            run = runs.get(blocks[depth])
            if run is None:
                last = PendingRun(blocks, depth, count, last, increment, bit)
                runs[blocks[depth]] = last
                break
            end = _shared_end(run, blocks)
            if end < run.end:
                run = self._split(run, end)
            run.counts += increment
            run.ranks |= bit
            depth = end
            last = run
        return last

    def release(self, last: PendingRun | None, rank: int) -> None:
        """Undo one call of `promise` for `rank`, which returned `last`."""
        run = last
        shift = rank * _COUNT_BITS
        while run is not None:
            run.counts -= 1 << shift
            if not run.counts:
                del self._runs[run.blocks[run.start]]
            elif not run.counts >> shift & _COUNT_MASK:
                run.ranks &= ~(1 << rank)
            run = run.parent

    def _split(self, run: PendingRun, middle: int) -> PendingRun:
        """Split a run and return the beginning, a new run. The old one, which `release` refers to, becomes the end."""
        head = PendingRun(run.blocks, run.start, middle, run.parent, run.counts, run.ranks)
        self._runs[run.blocks[run.start]] = head
        self._runs[run.blocks[middle]] = run
        run.start = middle
        run.parent = head
        return head


def set_bits(mask: int) -> list[int]:
    """Return the indices of the set bits of `mask`, ascending."""
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


def _shared_end(run: PendingRun, blocks: Sequence[BlockHash]) -> int:
    """Return the index up to which `blocks` equal the blocks of `run`. The first block of the run is equal."""
    run_blocks = run.blocks
    end = run.end
    if end > len(blocks):
        end = len(blocks)
    if run_blocks is blocks or run_blocks[end - 1] == blocks[end - 1]:
        return end
    same, different = run.start, end - 1
    while different - same > 1:
        middle = (same + different) // 2
        if run_blocks[middle] == blocks[middle]:
            same = middle
        else:
            different = middle
    return different
