"""Which rank holds which prefix blocks (committed), and which it has been promised (pending).

Sets of ranks are bit masks. Committed blocks are a table from hash to mask. A rank that holds a block holds all before
it (a cache can use no other), so how far a rank holds a prompt is found by bisection. Pending blocks are counted, and
there a block is a step on the way of a whole prompt: runs of blocks that the same prompts go through are one node, so
that a prompt of a thousand blocks that nobody shares costs what one of ten costs. A hash covers all before it, so it
names the node that begins with it, and two runs agree up to the first difference and nowhere behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moepass.runtime.serving.router.routable import BlockHash

# Bits of a count: more requests than a rank can have at a time.
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1


class PendingRun:
    """Blocks [start, end) of a prompt, for as long as a request that goes through all of them is assigned.

    `counts` says how many such requests each rank has, in `_COUNT_BITS` bits for each: one number is much smaller than
    a table, and there is one for nearly every request. `ranks` has the bits of the ranks with at least one.
    """

    __slots__ = ("blocks", "counts", "end", "parent", "ranks", "start")

    def __init__(
        self, blocks: Sequence[BlockHash], start: int, end: int, parent: PendingRun | None, counts: int, ranks: int
    ) -> None:
        self.blocks = blocks
        self.start = start
        self.end = end
        self.parent = parent
        self.counts = counts
        self.ranks = ranks


class BlockTables:
    def __init__(self) -> None:
        self._committed: dict[BlockHash, int] = {}
        self._runs: dict[BlockHash, PendingRun] = {}  # by their first block

    def store(self, rank: int, block: BlockHash) -> None:
        self._committed[block] = self._committed.get(block, 0) | 1 << rank

    def evict(self, rank: int, block: BlockHash) -> None:
        ranks = self._committed.get(block, 0) & ~(1 << rank)
        if ranks:
            self._committed[block] = ranks
        else:
            self._committed.pop(block, None)

    def forget(self, rank: int) -> None:
        """Nothing is committed on `rank` any more."""
        kept = ~(1 << rank)
        self._committed = {block: left for block, ranks in self._committed.items() if (left := ranks & kept)}

    @property
    def committed(self) -> dict[BlockHash, int]:
        """A copy: the mask of ranks of every block."""
        return dict(self._committed)

    @property
    def pending(self) -> dict[BlockHash, dict[int, int]]:
        """A copy: of every block, how many assigned requests of each rank bring it."""
        return {block: _counts(run) for run in self._runs.values() for block in run.blocks[run.start : run.end]}

    def deepest(self, blocks: Sequence[BlockHash], ranks: int) -> tuple[int, int]:
        """Those of `ranks` with the most leading blocks, committed or pending, and how many; all `ranks` for 0."""
        if not blocks:
            return ranks, 0
        found, depth = ranks, 0
        run = self._runs.get(blocks[0])
        while run is not None and (promised := run.ranks & ranks):
            found = promised
            depth = _agreed(run, blocks)
            if depth < run.end or depth == len(blocks):
                break
            run = self._runs.get(blocks[depth])
        # Whoever holds a block holds all before it. So committed blocks count only where they lead further, or as far.
        committed = self._committed.get
        if depth < len(blocks) and (held := committed(blocks[depth], 0) & ranks):
            return self._deepest_committed(blocks, ranks, depth + 1, held)
        return (found | committed(blocks[depth - 1], 0) & ranks if depth else found), depth

    def _deepest_committed(self, blocks: Sequence[BlockHash], ranks: int, depth: int, held: int) -> tuple[int, int]:
        """The same among committed blocks, if `held` of the ranks hold the first `depth` of them."""
        committed = self._committed.get
        step = 1
        missing = len(blocks) + 1  # so many nobody holds
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
        """`rank` will have `blocks`, until the run that this returns is given to `release`. None for no blocks."""
        runs = self._runs
        bit = 1 << rank
        one = 1 << rank * _COUNT_BITS
        count = len(blocks)
        depth = 0
        last: PendingRun | None = None
        while depth < count:
            run = runs.get(blocks[depth])
            if run is None:
                last = PendingRun(blocks, depth, count, last, one, bit)
                runs[blocks[depth]] = last
                break
            end = _agreed(run, blocks)
            if end < run.end:
                run = self._split(run, end)
            run.counts += one
            run.ranks |= bit
            depth = end
            last = run
        return last

    def release(self, last: PendingRun | None, rank: int) -> None:
        """Takes back what one call of `promise` for `rank` did."""
        run = last
        shift = rank * _COUNT_BITS
        while run is not None:
            run.counts -= 1 << shift
            if not run.counts:
                del self._runs[run.blocks[run.start]]
            elif not run.counts >> shift & _COUNT_MASK:
                run.ranks &= ~(1 << rank)
            run = run.parent

    def _split(self, run: PendingRun, place: int) -> PendingRun:
        """Cuts a run; the new one is its beginning, because those who will release the old one mean its end."""
        head = PendingRun(run.blocks, run.start, place, run.parent, run.counts, run.ranks)
        self._runs[run.blocks[run.start]] = head
        self._runs[run.blocks[place]] = run
        run.start = place
        run.parent = head
        return head


def _counts(run: PendingRun) -> dict[int, int]:
    ranks = range(run.ranks.bit_length())
    return {rank: count for rank in ranks if (count := run.counts >> rank * _COUNT_BITS & _COUNT_MASK)}


def _agreed(run: PendingRun, blocks: Sequence[BlockHash]) -> int:
    """Up to where `blocks` are those of the run, whose first one they share."""
    known = run.blocks
    end = run.end
    if end > len(blocks):
        end = len(blocks)
    if known is blocks or known[end - 1] == blocks[end - 1]:
        return end
    same, other = run.start, end - 1
    while other - same > 1:
        middle = (same + other) // 2
        if known[middle] == blocks[middle]:
            same = middle
        else:
            other = middle
    return other
