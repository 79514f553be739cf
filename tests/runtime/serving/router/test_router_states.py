"""After any sequence of events, the router knows and decides the same as an oracle that computes from scratch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from benchmarks.serving.simple_routers import LeastTokensRouter, RoundRobinRouter
from moepass.runtime.serving.router.prefix_router import MOST_PASSED_OVER, PrefixRouter
from moepass.runtime.serving.router.routable import RoutableRequest
from moepass.runtime.serving.router.router import RankRouter
from tests.helpers.mutants.random_cases import times
from tests.helpers.serving.router_oracle import BLOCK, LinearAndPairs, RouterOracle, assignments_of, questions_of

FORMULA = LinearAndPairs()
SATURATION = st.sampled_from([1, 300, 2000, 6000, 20000])


def chain(path: tuple[int, ...]) -> tuple[int, ...]:
    """Return the hashes of the blocks on a path through a tree in which every block has a few successors."""
    hashes, block = [], 1
    for turn in path:
        block = block * 4 + turn
        hashes.append(block)
    return tuple(hashes)


def behind_or_at(block: int, first: int) -> bool:
    return block == first or (block > first and behind_or_at(block // 4, first))


# Most paths take the first successor, so that many prompts share long prefixes.
CHAINS = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=6).map(lambda path: chain(tuple(path)))


@st.composite
def part_trees(draw: st.DrawFn) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    for number in range(draw(st.integers(0, 8))):
        # Mostly questions, some of them with labels.
        parent = draw(st.sampled_from([-1, -1, -1, number - 1]))
        parts.append((parent, draw(st.integers(1, 40))))
    return parts


@st.composite
def asked_requests(draw: st.DrawFn) -> dict[str, Any]:
    blocks = draw(CHAINS)
    parts = draw(st.one_of(st.just([]), part_trees()))
    prompt_tokens = len(blocks) * BLOCK + draw(st.integers(1, 40))
    return {
        "blocks": blocks,
        "prompt_tokens": prompt_tokens,
        "questions": questions_of(prompt_tokens, parts),
        "priority": draw(st.sampled_from([0, 0, 0, -1, 1, 2])),
        "patience": draw(st.sampled_from([math.inf, math.inf, math.inf, 0.5, 3.0, 30.0])),
    }


class RouterMachine(RuleBasedStateMachine):
    router: RankRouter
    oracle: RouterOracle
    is_prefix_router = True

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ranks = data.draw(st.integers(1, 4), label="ranks")
        keeps_blocks = data.draw(st.booleans(), label="keeps blocks")
        saturation: float = data.draw(SATURATION, label="saturation")
        settled: dict[str, Any] = {"keeps_blocks": keeps_blocks}
        self.is_prefix_router = data.draw(st.integers(0, 4), label="policy") > 0
        if self.is_prefix_router:
            self.router = PrefixRouter(
                ranks,
                FORMULA,
                saturation_flops=int(saturation),
                flops_per_second=1000.0,
                **settled,
            )
        else:
            saturation = math.inf
            simple = data.draw(st.sampled_from([RoundRobinRouter, LeastTokensRouter]), label="simple")
            self.router = simple(ranks, FORMULA, **settled)
        self.oracle = RouterOracle(
            ranks,
            FORMULA,
            saturation_flops=saturation,
            flops_per_second=1000.0,
            keeps_blocks=keeps_blocks,
            most_passed_over=MOST_PASSED_OVER,
        )
        self.now = 0.0
        self.submitted = 0
        self.ended: list[str] = []
        self.numbers: list[int] = []

    @rule(asked=st.lists(asked_requests(), min_size=1, max_size=8))
    def submit(self, asked: list[dict[str, Any]]) -> None:
        for fields in asked:
            self.submitted += 1
            patience = fields.pop("patience")
            request = RoutableRequest(id=f"r{self.submitted}", deadline=self.now + patience, arrived=self.now, **fields)
            self.router.submit(request)
            self.oracle.submit(request, self.submitted)

    @rule(seconds=st.sampled_from([0.0, 0.25, 2.0]))
    def route(self, seconds: float) -> None:
        self.now += seconds
        made = self.router.route(self.now)
        self.oracle.check_round(made, self.now, is_prefix_router=self.is_prefix_router)
        self.ended += [withdrawal.request_id for withdrawal in made.expired]
        self.numbers += [assignment.number for assignment in made.assignments]

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers), label="number")
        piece = self.oracle.running().get(number)
        assert self.router.started(number) == (piece is not None)
        if piece is not None:
            piece.is_started = True

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self.numbers), label="number"))

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), is_stored=st.booleans())
    def finish_a_step(self, data: st.DataObject, is_stored: bool) -> None:
        """A rank finishes all its work, and a round follows in which it may be the only open rank."""
        pieces = list(self.oracle.running().values())
        if not pieces:
            return
        rank = data.draw(st.sampled_from(pieces), label="piece").assignment.rank
        for piece in pieces:
            if piece.assignment.rank == rank:
                if is_stored:
                    self.store(rank, piece.request.blocks)
                self._finish(piece.assignment.number)
        self.route(0.25)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(1, self.submitted), label='request')}"
        is_open = request_id in self.oracle.open_ids()
        withdrawal = self.router.cancel(request_id)
        assert (withdrawal is not None) == is_open
        if withdrawal is not None:
            assert sorted(withdrawal.assignments) == sorted(self.oracle.end(request_id))
            self.ended.append(request_id)

    @rule(rank=st.integers(0, 3), blocks=CHAINS)
    def store(self, rank: int, blocks: tuple[int, ...]) -> None:
        if rank < self.oracle.ranks:
            for block in blocks:
                self.router.block_stored(rank, block)
            if rank in self.oracle.available:
                self.oracle.blocks[rank].update(blocks)

    @rule(rank=st.integers(0, 3), blocks=CHAINS)
    def evict(self, rank: int, blocks: tuple[int, ...]) -> None:
        if rank < self.oracle.ranks:
            # A block is evicted after its successors.
            for block in sorted(self.oracle.blocks[rank], reverse=True):
                if blocks and behind_or_at(block, blocks[-1]):
                    self.router.block_evicted(rank, block)
                    self.oracle.blocks[rank].discard(block)

    @rule(rank=st.integers(0, 3))
    def lose(self, rank: int) -> None:
        if rank < self.oracle.ranks:
            self._lose(rank)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def lose_a_busy_rank(self, data: st.DataObject) -> None:
        pieces = list(self.oracle.running().values())
        if pieces:
            piece = data.draw(st.sampled_from(pieces), label="piece")
            self._lose(piece.assignment.rank)

    def _lose(self, rank: int) -> None:
        loss = self.router.rank_lost(rank)
        again, failed = self.oracle.lose(rank)
        assert set(loss.rerun) == again
        assert {withdrawal.request_id for withdrawal in loss.failed} == failed
        assert len(loss.failed) == len(failed)
        self.ended += failed

    @rule(rank=st.integers(0, 3))
    def bring_back(self, rank: int) -> None:
        if rank < self.oracle.ranks:
            self.router.rank_back(rank)
            self.oracle.available.add(rank)

    @invariant()
    def knows_what_is(self) -> None:
        if not hasattr(self, "router"):
            return
        assert self.router.loads == self.oracle.loads()
        assert self.router.tables.pending == self.oracle.pending()
        assert self.router.tables.committed == self.oracle.committed()
        assert set(self.router.requests) == self.oracle.open_ids()
        assert self.router.queue.count == len(self.oracle.waiting())
        assert self.router.queue.flops == self.oracle.waiting_flops()
        assert {assignment.number: assignment for assignment in assignments_of(self.router)} == {
            number: piece.assignment for number, piece in self.oracle.running().items()
        }

    def teardown(self) -> None:
        """Every request ends once, and no state is left."""
        if not hasattr(self, "router"):
            return
        for rank in range(self.oracle.ranks):
            self.bring_back(rank)
        while self.router.requests:
            self.route(0.0)
            # The last request may expire in this round after the loss of its rank.
            assert assignments_of(self.router) or not self.router.requests, (
                "requests wait and no rank has anything to do"
            )
            for number in list(self.oracle.running()):
                self._finish(number)
            self.knows_what_is()
        assert sorted(self.ended) == sorted(f"r{number}" for number in range(1, self.submitted + 1))
        assert not any(self.router.loads)
        assert self.router.tables.pending == {}
        assert (self.router.queue.count, self.router.queue.flops) == (0, 0)

    def _finish(self, number: int) -> None:
        piece = self.oracle.running().get(number)
        left = self.router.done(number)
        assert left == self.oracle.done(number)
        if piece is not None and left == 0:
            self.ended.append(piece.request.id)


def test_the_router_is_what_the_oracle_computes() -> None:
    run_state_machine_as_test(RouterMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_router_is_what_the_oracle_computes_in_many_sequences() -> None:
    """Sequences are the same in every run; TEST_TIMES asks for more of them."""
    count = times(250)
    run_state_machine_as_test(
        RouterMachine, settings=settings(max_examples=count, stateful_step_count=40, deadline=None)
    )
