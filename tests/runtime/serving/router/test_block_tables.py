"""Block tables find the same as plain sets, on prompts much longer than those of the state machine."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.runtime.serving.router.block_tables import BlockTables, PendingRun

RANKS = 3
# Prompts are prefixes of a few long ones, which differ from the main prompt from these indices on.
LENGTH = 60
LEAVES = (0, 1, 2, 17, 31, 32, 59)


def prompt(branch: int, length: int) -> tuple[int, ...]:
    """Return the main prompt up to the point where `branch` leaves it, then blocks of that branch."""
    leaves = LENGTH if branch == 0 else LEAVES[branch - 1]
    return tuple(index if index < leaves else 1000 * branch + index for index in range(length))


PROMPTS = st.builds(prompt, st.integers(0, len(LEAVES)), st.integers(0, LENGTH))


def expected(holders: dict[int, set[int]], blocks: tuple[int, ...], ranks: list[int]) -> tuple[int, int]:
    lengths = {rank: len(list(itertools.takewhile(holders[rank].__contains__, blocks))) for rank in ranks}
    most = max(lengths.values())
    return sum(1 << rank for rank, length in lengths.items() if length == most), most


@settings(max_examples=100)
@given(st.data())
def test_tables_find_what_sets_find(data: st.DataObject) -> None:
    tables = BlockTables()
    stored: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    promised: list[tuple[tuple[int, ...], int, PendingRun | None]] = []
    ranks = st.integers(0, RANKS - 1)
    for _ in range(data.draw(st.integers(1, 25), label="changes")):
        change = data.draw(st.sampled_from(["promise", "promise", "release", "store", "evict", "forget"]))
        if change == "release" and promised:
            _, rank, last = promised.pop(data.draw(st.integers(0, len(promised) - 1)))
            tables.release(last, rank)
            continue
        blocks, rank = data.draw(PROMPTS), data.draw(ranks)
        if change == "promise":
            promised.append((blocks, rank, tables.promise(blocks, rank)))
        elif change == "store":
            for block in blocks:
                tables.store(rank, block)
            stored[rank].update(blocks)
        elif change == "evict":
            # A rank evicts later blocks first.
            other_prompts = {block for block in stored[rank] if block not in blocks}
            gone = [block for block in blocks if block in stored[rank]] if not other_prompts else []
            for block in reversed(gone):
                tables.evict(rank, block)
                stored[rank].remove(block)
        elif change == "forget":
            tables.forget(rank)
            stored[rank] = set()
        holders = {rank: set(blocks) for rank, blocks in stored.items()}
        for promised_blocks, rank, _ in promised:
            holders[rank].update(promised_blocks)
        asked = data.draw(PROMPTS, label="asked")
        among = data.draw(st.lists(ranks, min_size=1, unique=True), label="among")
        assert tables.longest_match(asked, sum(1 << rank for rank in among)) == expected(holders, asked, among)
    for _, rank, last in promised:
        tables.release(last, rank)
    assert tables.pending == {}
    assert tables.committed == {
        block: sum(1 << rank for rank in range(RANKS) if block in stored[rank])
        for block in set().union(*stored.values())
    }


def test_long_prompts_that_nobody_shares_take_one_run() -> None:
    tables = BlockTables()
    last = tables.promise(range(10_000), 1)
    assert last is not None
    assert (last.start, last.end, last.parent) == (0, 10_000, None)
    second = tables.promise((*range(5_000), -1), 0)
    assert second is not None
    assert (second.start, second.end) == (5_000, 5_001)
    assert second.parent is last.parent
    tables.release(last, 1)
    tables.release(second, 0)
    assert tables.pending == {}
