"""The index of the cache: single rules, and invariants under random sequences of steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moepass.models.sizes.architecture import Architecture, Attention, Layer
from moepass.runtime.serving.batching.block_hashes import OfferedBlocks, RequestHashes, path_hashes, request_hashes
from moepass.runtime.serving.batching.pack import pack
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.cache.block_index import BlockIndex, StepLease
from moepass.runtime.serving.requests.answer import ScoredTokens
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from tests.helpers.serving.naive_packing import KEY, STORIES

TABLE = FlopsTable(Architecture("test", "test", 8, 50, "fp32", (Layer(Attention("full", 2, 1, 4, 4), None, 16),)))


def chain(*names: bytes) -> RequestHashes:
    """Return a request of one piece."""
    return RequestHashes(names, np.array([0, len(names)]), np.arange(-1, len(names) - 1))


def offer(names: tuple[bytes, ...], requests: int = 2, branches: int = 1) -> OfferedBlocks:
    return OfferedBlocks(
        names,
        (None, *names)[: len(names)],
        np.full(len(names), requests),
        np.full(len(names), branches),
        np.zeros((len(names), BLOCK_TOKENS), np.int64),
    )


def store(index: BlockIndex, *names: bytes, requests: int = 2, branches: int = 1) -> list[int]:
    with index.lease() as lease:
        lease.match(chain(*names))
        blocks = lease.reserve(offer(names, requests, branches)).tolist()
        lease.commit()
    return blocks


def found(index: BlockIndex, *names: bytes) -> list[int]:
    with index.lease() as lease:
        return lease.match(chain(*names)).blocks.tolist()


def test_shared_blocks_are_found_from_commit_on() -> None:
    index = BlockIndex(4)
    lease = index.lease()
    blocks = lease.reserve(offer((b"a", b"b")))
    assert sorted(set(blocks.tolist())) == sorted(blocks.tolist())
    assert found(index, b"a", b"b") == [-1, -1]
    lease.commit()
    assert found(index, b"a", b"b", b"c") == [*blocks.tolist(), -1]


@pytest.mark.parametrize(("requests", "branches", "is_kept"), [(2, 1, True), (1, 2, True), (1, 1, False)])
def test_blocks_that_a_step_shares_are_kept(requests: int, branches: int, is_kept: bool) -> None:
    index = BlockIndex(4)
    store(index, b"a", requests=requests, branches=branches)
    assert (found(index, b"a") != [-1]) == is_kept


def test_blocks_that_come_again_are_kept() -> None:
    index = BlockIndex(4)
    assert store(index, b"a", b"b", requests=1) == [-1, -1]
    assert -1 not in store(index, b"a", b"b", requests=1)


def test_blocks_that_a_failed_step_offered_have_not_come() -> None:
    index = BlockIndex(4)
    with index.lease() as lease:
        lease.reserve(offer((b"a",), requests=1))
    assert store(index, b"a", requests=1) == [-1]


def test_only_recent_hashes_are_remembered_beginnings_longest() -> None:
    index = BlockIndex(4, recent_hashes=2)
    store(index, b"a", b"b", b"c", requests=1)
    assert [block >= 0 for block in store(index, b"a", b"b", b"c", requests=1)] == [True, True, False]


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    index = BlockIndex(2)

    def step() -> None:
        with index.lease() as lease:
            lease.reserve(offer((b"a", b"b")))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert found(index, b"a", b"b") == [-1, -1]
    assert index.drain_events() == {}
    assert -1 not in store(index, b"c", b"d")


def test_nothing_is_kept_behind_what_is_not() -> None:
    index = BlockIndex(1)
    assert store(index, b"a", b"b")[1] == -1
    assert found(index, b"a", b"b")[1] == -1


def test_two_steps_that_overlap_do_not_keep_the_same_twice() -> None:
    index = BlockIndex(4)
    first, second = index.lease(), index.lease()
    assert -1 not in first.reserve(offer((b"a", b"b")))
    assert second.reserve(offer((b"a", b"c"))).tolist() == [-1, -1]
    second.commit()
    first.commit()
    assert found(index, b"a", b"c")[1] == -1
    # Blocks that were rejected for lack of space have been offered once, and are offered again now.
    assert store(index, b"a", b"c", requests=1)[1] >= 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    index = BlockIndex(4)
    store(index, b"a", b"b")
    store(index, b"c", b"d")
    found(index, b"a", b"b")
    store(index, b"e")
    assert list(index.drain_events().items())[-2:] == [(b"d", "evicted"), (b"e", "stored")]
    store(index, b"f")
    assert found(index, b"c") == [-1]
    assert -1 not in found(index, b"a", b"b")


def test_blocks_of_a_running_step_are_not_evicted() -> None:
    index = BlockIndex(2)
    store(index, b"a", b"b")
    lease = index.lease()
    lease.match(chain(b"a", b"b"))
    assert store(index, b"c") == [-1]
    assert index.evict(2) == 0
    lease.release()
    assert index.evict(5) == 2
    assert len(index) == 0
    assert list(index.drain_events().items()) == [(b"b", "evicted"), (b"a", "evicted")]


def test_evicted_blocks_are_kept_when_they_come_again() -> None:
    index = BlockIndex(1)
    store(index, b"a")
    index.evict(1)
    assert store(index, b"a", requests=1) == [0]


def test_scores_do_not_outlive_their_block() -> None:
    index = BlockIndex(1)
    (block,) = store(index, b"a")
    values = np.ones(1, np.float32)
    scores = ScoredTokens(values, values.astype(np.int32)[:, None], values[:, None])
    index.scores.write(np.array([block * BLOCK_TOKENS]), scores)
    with index.lease() as lease:
        assert lease.match(chain(b"a")).scores_known.sum() == 1
    store(index, b"b")
    with index.lease() as lease:
        assert lease.match(chain(b"b")).scores_known.sum() == 0


def test_an_index_that_is_off_keeps_and_remembers_nothing() -> None:
    index = BlockIndex(0)
    for _ in range(2):
        assert store(index, b"a", b"b") == [-1, -1]
    assert index.drain_events() == {}
    assert not index._recent


def test_a_lease_ends_once() -> None:
    lease = BlockIndex(1).lease()
    lease.commit()
    for call in (lease.commit, lease.release, lambda: lease.match(chain(b"a")), lambda: lease.reserve(offer(()))):
        with pytest.raises(AssertionError):
            call()


def test_questions_over_one_prompt_come_from_the_cache_in_the_next_step() -> None:
    index = BlockIndex(16)
    prompt = TokenPiece(-1, np.arange(40, dtype=np.int32), is_scored=True)

    def step(first: int) -> tuple[int, int]:
        asked = (TokenRead(0, np.array([1], np.int32)),)
        questions = (TokenPiece(0, np.array([first + number], np.int32), asked) for number in range(2))
        request = Request("a", (prompt, *questions))
        with index.lease() as lease:
            packed = pack([request], TABLE, [lease.match(request_hashes(request, KEY))])
            blocks = lease.reserve(packed.offered)
            at = packed.scores.predicted_at
            values = np.where(at >= 0, at, 0).astype(np.float32)
            scores = ScoredTokens(values, values.astype(np.int32)[:, None], values[:, None])
            index.scores.write(packed.written_slots(blocks), scores)
            lease.commit()
        assert len(packed.storing(blocks).stored) == (2 if first == 0 else 0)
        return packed.batch.count, packed.placements[0].usage.cached_tokens

    assert step(0) == (42, 0)
    # The scores of the prompt are known, except for the first token, which has no score, and 8 after the last block.
    assert step(10) == (16 + 10, 16)
    with index.lease() as lease:
        matched = lease.match(request_hashes(Request("a", (prompt,)), KEY))
    assert matched.scores_known.sum() == 31
    last_scores = index.scores.read(matched.blocks[[0, 1]] * BLOCK_TOKENS + 15)
    assert last_scores.log_probabilities.tolist() == [14, 30]


@dataclasses.dataclass
class Open:
    lease: StepLease
    pinned: dict[int, bytes]
    reserved: dict[bytes, int]


class IndexMachine(RuleBasedStateMachine):
    """Steps that overlap, fail and share blocks, on a cache that is too small, compared with their history."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 7
        self.index = BlockIndex(self.count, recent_hashes=10)
        self.open: list[Open] = []
        self.stored: dict[bytes, int] = {}
        self.previous: dict[bytes, bytes | None] = {}
        self.last_uses: dict[bytes, int] = {}
        self.replayed: set[bytes] = set()

    def sync_evictions(self) -> None:
        for name, kind in self.index.drain_events().items():
            if kind == "stored":
                self.replayed.add(name)
            else:
                self.replayed.discard(name)
        for name in set(self.stored) - self.replayed:
            assert all(name not in lease.pinned.values() for lease in self.open)
            del self.stored[name]

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def begin(self) -> None:
        self.open.append(Open(self.index.lease(), {}, {}))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), story=st.integers(0, len(STORIES) - 1), blocks=st.integers(1, 5), requests=st.integers(1, 2))
    def match_and_reserve(self, data: st.DataObject, story: int, blocks: int, requests: int) -> None:
        step = data.draw(st.sampled_from(self.open))
        names = tuple(path_hashes(STORIES[story][: blocks * BLOCK_TOKENS].astype(np.int32), KEY))
        matched = step.lease.match(chain(*names)).blocks.tolist()
        assert matched == [self.stored.get(name, -1) for name in names]
        self.last_uses |= {name: self.index._now for name, block in zip(names, matched, strict=True) if block >= 0}
        step.pinned |= {block: name for block, name in zip(matched, names, strict=True) if block >= 0}
        self.previous |= dict(zip(names, (None, *names), strict=False))
        begin = data.draw(st.integers(0, blocks))
        new = tuple(name for name in names[begin:] if name not in self.stored)
        offered = dataclasses.replace(offer(new, requests), previous=tuple(self.previous[name] for name in new))
        reserved = step.lease.reserve(offered).tolist()
        self.sync_evictions()
        busy = {block for lease in self.open for block in (*lease.pinned, *lease.reserved.values())} | {
            *self.stored.values()
        }
        for name, block in zip(new, reserved, strict=True):
            if block >= 0:
                assert block not in busy
                before = self.previous[name]
                assert before is None or before in self.stored or before in step.reserved
                assert all(name not in lease.reserved for lease in self.open)
                busy.add(block)
                step.reserved[name] = block

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        step.lease.commit()
        self.stored |= step.reserved
        self.last_uses |= dict.fromkeys(step.reserved, self.index._now)
        self.sync_evictions()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.open.pop(data.draw(st.integers(0, len(self.open) - 1))).lease.release()
        self.sync_evictions()

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        held = {name for lease in self.open for name in lease.pinned.values()}
        for _ in range(count):
            before_others = {self.previous[name] for name in self.stored}
            before_others |= {self.previous[name] for lease in self.open for name in lease.reserved}
            leaves = set(self.stored) - before_others - held
            before = set(self.stored)
            assert self.index.evict(1) == bool(leaves)
            self.sync_evictions()
            gone = before - set(self.stored)
            assert gone <= leaves
            assert [self.last_uses[name] for name in gone] == sorted(self.last_uses[name] for name in leaves)[:1]

    @invariant()
    def each_block_is_in_one_place(self) -> None:
        used = [*self.stored.values(), *(block for lease in self.open for block in lease.reserved.values())]
        assert sorted([*used, *self.index._free]) == list(range(self.count))
        assert len(self.index) == len(self.stored)
        assert self.replayed == set(self.stored)

    @invariant()
    def each_block_stands_behind_the_one_before_it(self) -> None:
        for name in self.stored:
            assert self.previous[name] is None or self.previous[name] in self.stored

    def teardown(self) -> None:
        for lease in self.open:
            lease.lease.release()
        self.index.evict(self.count)
        assert len(self.index) == 0
        assert sorted(self.index._free) == list(range(self.count))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30)
