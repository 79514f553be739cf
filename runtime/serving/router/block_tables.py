"""Which rank holds which prefix blocks (committed), and which it has been promised (pending).

Sets of ranks are bit masks. Committed blocks are a table from hash to mask. Pending ones are counted, and there a block
is a step on the way of a whole prompt: runs of blocks that the same prompts go through are one node, so that a prompt
of a thousand blocks that nobody shares costs what one of ten costs. A hash covers all before it, so it names the node
that begins with it, and two runs agree up to the first difference and nowhere behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moepass.runtime.serving.router.routable import BlockHash


class PendingRun:
    """Blocks [start, end) of a prompt, for as long as a request that goes through all of them is assigned.

    `counts` says for each rank how many such requests it has, `ranks` has the bits of those with at least one.
    """

    __slots__ = ("blocks", "counts", "end", "parent", "ranks", "start")

    def __init__(
        self,
        blocks: Sequence[BlockHash],
        start: int,
        end: int,
        parent: PendingRun | None,
        counts: dict[int, int],
        ranks: int,
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
        return {block: dict(run.counts) for run in self._runs.values() for block in run.blocks[run.start : run.end]}

    def deepest(self, blocks: Sequence[BlockHash], ranks: int) -> tuple[int, int]:
        """Those of `ranks` with the most leading blocks, committed or pending, and how many; all `ranks` for 0."""
        committed = self._committed.get
        runs = self._runs
        depth = 0
        count = len(blocks)
        is_pending = True
        while depth < count:
            # Promised prefixes begin at the beginning: behind the first block that no one promised there is none.
            run = runs.get(blocks[depth]) if is_pending else None
            if run is None:
                is_pending = False
                promised = 0
                end = count
            else:
                promised = run.ranks
                end = _agreed(run, blocks)
            if ranks & ~promised:
                while depth < end:
                    left = (committed(blocks[depth], 0) | promised) & ranks
                    if not left:
                        return ranks, depth
                    ranks = left
                    depth += 1
            depth = end
        return ranks, depth

    def promise(self, blocks: Sequence[BlockHash], rank: int) -> PendingRun | None:
        """`rank` will have `blocks`, until the run that this returns is given to `release`. None for no blocks."""
        runs = self._runs
        bit = 1 << rank
        count = len(blocks)
        depth = 0
        last: PendingRun | None = None
        while depth < count:
            run = runs.get(blocks[depth])
            if run is None:
                last = PendingRun(blocks, depth, count, last, {rank: 1}, bit)
                runs[blocks[depth]] = last
                break
            end = _agreed(run, blocks)
            if end < run.end:
                run = self._split(run, end)
            run.counts[rank] = run.counts.get(rank, 0) + 1
            run.ranks |= bit
            depth = end
            last = run
        return last

    def release(self, last: PendingRun | None, rank: int) -> None:
        """Takes back what one call of `promise` for `rank` did."""
        run = last
        while run is not None:
            counts = run.counts
            left = counts[rank] - 1
            if left:
                counts[rank] = left
            else:
                del counts[rank]
                run.ranks &= ~(1 << rank)
                if not counts:
                    del self._runs[run.blocks[run.start]]
            run = run.parent

    def _split(self, run: PendingRun, place: int) -> PendingRun:
        """Cuts a run; the new one is its beginning, because those who will release the old one mean its end."""
        head = PendingRun(run.blocks, run.start, place, run.parent, dict(run.counts), run.ranks)
        self._runs[run.blocks[run.start]] = head
        self._runs[run.blocks[place]] = run
        run.start = place
        run.parent = head
        return head


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
