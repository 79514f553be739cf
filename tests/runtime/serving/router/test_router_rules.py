"""Each rule of the router in a small example: a token costs 1, and pairs cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.serving.simple_routers import LeastTokensRouter, RoundRobinRouter
from moepass.runtime.serving.router import prefix_router
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import Assignment, RankLoss, RoutableRequest
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.router.waiting_queue import RoutedQuestion, WaitingQueue, Work
from tests.helpers.serving.router_oracle import LinearAndPairs, assignments_of, questions_of

TOKENS = LinearAndPairs(per_token=1, per_pair=0)


def make_router(ranks: int = 2, saturation: int = 100, **options: Any) -> PrefixRouter:
    return PrefixRouter(ranks, TOKENS, saturation_flops=saturation, flops_per_second=10.0, **options)


def request(name: str, tokens: int, blocks: Sequence[int | bytes] = (), **options: Any) -> RoutableRequest:
    return RoutableRequest(name, tuple(blocks), tokens, **options)


def asked(name: str, prompt: int, questions: Sequence[int], blocks: Sequence[int] = ()) -> RoutableRequest:
    return request(name, prompt, blocks, questions=questions_of(prompt, [(-1, tokens) for tokens in questions]))


def ranks_of(assignments: Sequence[Assignment]) -> dict[str, int]:
    return {assignment.request_id: assignment.rank for assignment in assignments}


def routed(router: RankRouter, *requests: RoutableRequest, now: float = 0.0) -> list[Assignment]:
    for routable in requests:
        router.submit(routable)
    return router.route(now).assignments


def finish(router: RankRouter, assignments: Sequence[Assignment]) -> None:
    for assignment in assignments:
        assert router.started(assignment.number)
        assert router.done(assignment.number) is not None


# Loads and saturation


def test_what_is_added_is_taken_away() -> None:
    # Differences of 1 are lost in floats of this size.
    exact = LinearAndPairs(per_token=10**17 + 1, per_pair=1)
    router = PrefixRouter(2, exact, saturation_flops=10**30, flops_per_second=1e15)
    assignments = routed(router, *(request(f"r{number}", 1 + number) for number in range(7)))
    assert sum(router.loads) == 28 * (10**17 + 1) + 84
    for assignment in assignments:
        assert router.done(assignment.number) == 0
    assert router.loads == (0, 0)
    assert not router.requests


def test_a_round_fills_every_rank_to_the_threshold_and_no_further() -> None:
    router = make_router(ranks=3)
    assignments = routed(router, *(request(f"r{number}", 30) for number in range(20)))
    assert router.loads == (120, 120, 120)
    assert len(assignments) == 12
    assert (router.queue.count, router.queue.flops) == (8, 240)
    assert router.route(1.0).assignments == []


def test_a_rank_takes_work_again_when_its_load_falls_below_the_threshold() -> None:
    router = make_router(ranks=1)
    first, second = routed(router, request("a", 60), request("b", 60), request("c", 60))
    assert router.done(first.number) == 0
    assert ranks_of(router.route(0.0).assignments) == {"c": 0}
    assert router.loads == (120,)
    assert second.flops == 60


def test_an_answer_counts_once() -> None:
    router = make_router()
    (assignment,) = routed(router, request("a", 5))
    assert router.started(assignment.number)
    assert router.done(assignment.number) == 0
    assert router.done(assignment.number) is None
    assert not router.started(assignment.number)
    assert router.cancel("a") is None


# Shared prefixes


def test_arrivals_of_one_round_share_what_the_first_one_brings() -> None:
    router = make_router(saturation=1000)
    blocks = range(1, 5)
    assignments = routed(router, *(request(name, 70, blocks) for name in "abc"))
    assert [(assignment.rank, assignment.flops) for assignment in assignments] == [(0, 70), (0, 6), (0, 6)]
    assert router.tables.pending == {block: {0: 3} for block in blocks}
    finish(router, assignments)
    assert router.tables.pending == {}
    assert router.loads == (0, 0)


def test_only_the_prefix_that_is_shared_counts() -> None:
    router = make_router(saturation=1000)
    assignments = routed(
        router, request("a", 70, [1, 2, 3, 4]), request("b", 70, [1, 2, 30, 40]), request("c", 70, [9])
    )
    assert [(assignment.rank, assignment.flops) for assignment in assignments] == [(0, 70), (0, 38), (1, 70)]


def test_the_most_blocks_win_and_ties_go_to_the_least_loaded() -> None:
    router = make_router(ranks=4, saturation=1000)
    routed(router, request("load", 50))
    for rank in (0, 1, 2):
        router.block_stored(rank, 1)
    router.block_stored(2, 2)
    assert ranks_of(routed(router, request("deep", 40, [1, 2]))) == {"deep": 2}
    assert ranks_of(routed(router, request("tie", 40, [1, 7]))) == {"tie": 1}
    assert ranks_of(routed(router, request("none", 40, [8, 9]))) == {"none": 3}


def test_stored_and_promised_blocks_make_one_prefix() -> None:
    router = make_router(saturation=1000)
    (first,) = routed(router, request("first", 70, [1, 2, 3]))
    router.block_stored(0, 1)
    router.block_stored(1, 1)
    (following,) = routed(router, request("next", 70, [1, 2, 3, 4]))
    assert (following.rank, following.flops) == (0, 70 - 48)
    assert first.rank == 0


def test_an_evicted_block_is_no_match() -> None:
    router = make_router(saturation=1000)
    for block in (1, 2):
        router.block_stored(1, block)
    router.block_evicted(1, 2)
    (assignment,) = routed(router, request("a", 70, [1, 2]))
    assert (assignment.rank, assignment.flops) == (1, 70 - 16)
    router.block_evicted(1, 1)
    router.block_evicted(1, 1)
    assert router.tables.committed == {}


def test_without_a_cache_only_work_that_has_not_begun_shares() -> None:
    router = make_router(saturation=1000, keeps_blocks=False)
    first, second = routed(router, request("a", 70, [1, 2]), request("b", 70, [1, 2]))
    assert (first.flops, second.flops) == (70, 70 - 32)
    router.started(first.number)
    assert router.tables.pending == {1: {0: 1}, 2: {0: 1}}
    router.started(second.number)
    router.started(second.number)
    assert router.tables.pending == {}
    (assignment,) = routed(router, request("c", 70, [1, 2]))
    assert (assignment.rank, assignment.flops) == (1, 70)
    finish(router, assignments_of(router))
    assert router.loads == (0, 0)


# Waiting for a saturated rank, or spilling


def test_other_work_goes_before_work_whose_prefix_a_saturated_rank_has() -> None:
    router = make_router()
    hot = [request(f"hot{number}", 68, [1, 2, 3, 4]) for number in range(12)]
    assignments = routed(router, *hot, *(request(f"other{number}", 50) for number in range(3)))
    # 68 + 8·4 = 100 saturate rank 0; three more wait for it, and the others fill rank 1.
    assert ranks_of(assignments) == {**{f"hot{number}": 0 for number in range(9)}, "other0": 1, "other1": 1}
    finish(router, [assignment for assignment in assignments if assignment.rank == 0])
    for block in (1, 2, 3, 4):
        router.block_stored(0, block)
    # hot9 to hot11 and other2 are equally urgent, and hot9 to hot11 arrived first.
    assert ranks_of(router.route(1.0).assignments) == {"hot9": 0, "hot10": 0, "hot11": 0, "other2": 0}


def test_a_hot_prefix_spills_where_a_rank_has_nothing_else_to_do() -> None:
    router = make_router()
    assignments = routed(router, *(request(f"hot{number}", 68, [1, 2, 3, 4]) for number in range(12)))
    spilled = [assignment for assignment in assignments if assignment.rank == 1]
    assert [(assignment.request_id, assignment.flops) for assignment in spilled] == [
        ("hot9", 68),
        ("hot10", 4),
        ("hot11", 4),
    ]
    # From now on, both ranks hold the prefix.
    assert router.tables.pending == {block: {0: 9, 1: 3} for block in (1, 2, 3, 4)}


def test_work_is_passed_over_for_as_long_as_the_saturated_rank_needs_by_the_plan() -> None:
    """A load of 100 FLOPs at 10 per second: work that arrives up to 10 s later goes first."""

    def first_on_rank_one(arrived: float) -> list[str]:
        router = make_router()
        routed(router, request("load", 100, [1, 2]), request("fill", 100))
        router.submit(request("hot", 40, [1, 2]))
        router.route(0.0)
        finish(router, [assignment for assignment in assignments_of(router) if assignment.rank == 1])
        for name in ("x", "y"):
            router.submit(request(name, 60, arrived=arrived))
        return [assignment.request_id for assignment in router.route(arrived).assignments]

    assert first_on_rank_one(9.0) == ["x", "y"]
    assert first_on_rank_one(11.0) == ["hot", "x"]


def test_a_part_waits_for_the_rank_that_the_whole_waited_for() -> None:
    """A share of split work has the queue key of the unsplit work, whose old entry is still in the queue."""
    waiting = WaitingQueue(2)
    both = asked("a", 40, [5, 7], blocks=(1,))
    unsplit = Work(both, (0.0, 1, 0), 40, tuple(RoutedQuestion(question.parts, 6) for question in both.questions), 52)
    waiting.park(unsplit, 0, 1.0)
    assert waiting.pop(0b10) is unsplit
    share = unsplit.with_questions(unsplit.questions[:1])
    waiting.park(share, 0, 1.0)
    assert waiting.pop(0b01) is share
    assert waiting.pop(0b11) is None
    assert (waiting.count, waiting.flops) == (0, 0)


def test_a_prefix_that_takes_longer_than_the_wait_is_never_computed_again() -> None:
    router = make_router()
    for block in range(20):
        router.block_stored(0, block)
    routed(router, request("load", 100, range(100, 101)), request("fill", 100))
    (held, fill) = assignments_of(router)
    document = request("document", 330, range(20))
    assert ranks_of([held, fill]) == {"load": 0, "fill": 1}
    finish(router, [fill])
    assert routed(router, document) == []  # computing it again costs 320, and the load of rank 0 is 100
    assert router.route(1000.0).assignments == []
    finish(router, [held])
    assert [(assignment.rank, assignment.flops) for assignment in router.route(1001.0).assignments] == [(0, 10)]


def test_work_that_waits_for_a_rank_goes_elsewhere_when_that_is_lost() -> None:
    router = make_router()
    for block in range(20):
        router.block_stored(0, block)
    routed(router, request("load", 100), request("document", 330, range(20)), request("fill", 100))
    assert ranks_of(assignments_of(router)) == {"load": 0, "fill": 1}
    finish(router, [assignments_of(router)[1]])
    assert router.rank_lost(0) == RankLoss(("load",), ())
    assert [
        (assignment.request_id, assignment.rank, assignment.flops) for assignment in router.route(0.0).assignments
    ] == [("load", 1, 100)]
    finish(router, assignments_of(router))
    assert [
        (assignment.request_id, assignment.rank, assignment.flops) for assignment in router.route(0.0).assignments
    ] == [("document", 1, 330)]


def test_who_would_be_late_does_not_wait() -> None:
    """The holder needs 10 s for its load, and the 4 FLOPs of the request take 0.4 s."""

    def waits(deadline: float) -> bool:
        router = make_router()
        routed(router, request("load", 100, [1, 2]))
        router.submit(request("hot", 36, [1, 2], deadline=deadline))
        router.submit(request("other", 100))
        return "hot" not in ranks_of(router.route(0.0).assignments)

    assert waits(10.4)
    assert waits(math.inf)
    assert not waits(10.3)


def test_a_round_passes_over_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MOST_PASSED_OVER", 2)
    router = make_router()
    routed(router, request("load", 100, [1, 2]))
    assignments = routed(router, *(request(f"hot{number}", 50, [1, 2]) for number in range(4)), request("other", 100))
    assert [assignment.request_id for assignment in assignments] == ["hot2", "hot3", "other"]
    assert {assignment.rank for assignment in assignments} == {1}


# Order


def test_higher_priorities_come_first_and_waiting_makes_up_for_them() -> None:
    router = make_router(ranks=1, saturation=1)
    for routable in (
        request("old", 10, arrived=0.0),
        request("new", 10, arrived=0.8),
        request("urgent", 10, arrived=0.8, priority=1),
        request("late", 10, arrived=1.2, priority=1),
        request("later", 10, arrived=0.9, priority=-1),
    ):
        router.submit(routable)
    order = []
    while router.requests:
        (assignment,) = router.route(10.0).assignments
        order.append(assignment.request_id)
        finish(router, [assignment])
    # By arrived - 5 · priority: -1, 0, 1, 4, 9.5.
    assert order == ["urgent", "old", "late", "new", "later"]


def test_what_was_lost_keeps_its_place() -> None:
    router = make_router(ranks=1, saturation=1)
    routed(router, request("a", 10), request("b", 10))
    router.rank_lost(0)
    router.rank_back(0)
    assert ranks_of(router.route(0.0).assignments) == {"a": 0}


# Ends


def test_a_request_expires_unless_all_of_it_has_started() -> None:
    router = make_router(ranks=1, saturation=30)
    started, assigned, _ = routed(
        router,
        *(request(name, 10, deadline=5.0) for name in ("started", "assigned", "done")),
        request("waiting", 10, deadline=5.0),
        request("patient", 10, deadline=5.1),
    )
    router.started(started.number)
    router.done(3)
    decisions = router.route(5.0)
    assert [(withdrawal.request_id, withdrawal.assignments) for withdrawal in decisions.expired] == [
        ("assigned", (assigned,)),
        ("waiting", ()),
    ]
    assert ranks_of(decisions.assignments) == {"patient": 0}
    assert router.done(assigned.number) is None
    assert router.done(started.number) == 0
    assert router.loads == (10,)


def test_the_deadline_of_a_request_is_not_that_of_the_next_with_its_id() -> None:
    router = make_router()
    finish(router, routed(router, request("a", 10, deadline=5.0)))
    router.rank_lost(0)
    router.rank_lost(1)
    router.submit(request("a", 10, deadline=9.0))
    assert router.route(6.0).expired == []
    assert [withdrawal.request_id for withdrawal in router.route(9.0).expired] == ["a"]


def test_a_request_of_which_the_rest_has_started_does_not_expire() -> None:
    router = make_router()
    questions = RoutableRequest("a", (), 10, questions_of(10, [(-1, 30)] * 10), deadline=5.0)
    first, second = routed(router, questions)
    assert router.done(first.number) == 1  # work that is done has started
    router.started(second.number)
    assert router.route(6.0).expired == []
    assert router.done(second.number) == 0


def test_what_runs_again_expires_as_well() -> None:
    router = make_router(ranks=1)
    (assignment,) = routed(router, request("a", 10, deadline=5.0))
    router.started(assignment.number)
    assert router.route(6.0).expired == []
    router.rank_lost(0)
    assert [withdrawal.request_id for withdrawal in router.route(6.0).expired] == ["a"]
    assert not router.requests


@pytest.mark.parametrize("state", ["waiting", "parked", "assigned", "started"])
def test_a_request_is_cancelled_in_any_state(state: str) -> None:
    router = make_router()
    if state == "waiting":
        routed(router, request("load0", 100), request("load1", 100))
    if state == "parked":
        routed(router, request("load0", 100, [1, 2]))
    assignments = routed(router, request("a", 40, [1, 2]), request("other", 100))
    if state == "started":
        router.started(assignments[0].number)
    load_before = sum(router.loads)
    withdrawal = router.cancel("a")
    assert withdrawal is not None
    withdrawn = tuple(assignment for assignment in assignments if assignment.request_id == "a")
    assert withdrawal.assignments == withdrawn
    assert len(withdrawn) == (state in ("assigned", "started"))
    assert sum(router.loads) == load_before - sum(assignment.flops for assignment in withdrawn)
    assert "a" not in router.requests
    finish(router, assignments_of(router))
    finish(router, router.route(0.0).assignments)
    assert (router.loads, router.queue.count, router.queue.flops, router.tables.pending) == ((0, 0), 0, 0, {})


# Lost and returning ranks


def test_a_request_survives_one_lost_rank_and_no_second() -> None:
    router = make_router()
    (first,) = routed(router, request("a", 10))
    assert router.rank_lost(first.rank) == RankLoss(("a",), ())
    assert router.rank_lost(first.rank) == RankLoss((), ())
    assert router.done(first.number) is None
    (second,) = router.route(0.0).assignments
    assert (second.request_id, second.rank) == ("a", 1 - first.rank)
    loss = router.rank_lost(second.rank)
    assert (loss.rerun, [withdrawal.request_id for withdrawal in loss.failed]) == ((), ["a"])
    assert (router.requests, router.loads, router.tables.pending) == ({}, (0, 0), {})


def test_a_lost_rank_has_no_blocks_and_gets_no_work_until_it_is_back() -> None:
    router = make_router()
    for block in (1, 2):
        router.block_stored(0, block)
    router.rank_lost(0)
    router.block_stored(0, 3)  # sent before the rank was lost
    router.block_evicted(0, 1)
    assert router.tables.committed == {}
    assert ranks_of(routed(router, request("a", 40, [1, 2]), request("b", 70))) == {"a": 1, "b": 1}
    router.rank_back(0)
    router.rank_back(0)
    (assignment,) = routed(router, request("c", 40, [1, 2]))
    assert (assignment.rank, assignment.flops) == (0, 40)


def test_all_ranks_may_be_lost_and_work_waits_for_one() -> None:
    router = make_router()
    router.rank_lost(0)
    router.rank_lost(1)
    assert routed(router, request("a", 10)) == []
    router.rank_back(1)
    assert ranks_of(router.route(0.0).assignments) == {"a": 1}


# Questions


def test_many_questions_are_split_where_that_pays() -> None:
    """A prompt of 10 and questions of 300: loads of 160 and 160 end 150 earlier than 310, and cost 10 more."""
    router = make_router()
    assignments = routed(router, asked("a", 10, [30] * 10))
    assert [(assignment.rank, assignment.parts, assignment.flops) for assignment in assignments] == [
        (0, (0, 1, 2, 3, 4), 160),
        (1, (5, 6, 7, 8, 9), 160),
    ]
    first, second = assignments
    assert router.done(first.number) == 1
    assert [*router.requests] == ["a"]
    assert router.done(second.number) == 0
    assert router.loads == (0, 0)


def test_many_questions_stay_together_where_the_prompt_costs_more_than_the_split_saves() -> None:
    router = make_router()
    # Loads of 350 and 350 instead of 500: the request would end 150 earlier, at a cost of 200.
    assignments = routed(router, asked("a", 200, [30] * 10))
    assert [(assignment.rank, assignment.parts, assignment.flops) for assignment in assignments] == [(0, None, 500)]


def test_many_questions_are_split_where_the_others_have_the_prompt() -> None:
    router = make_router()
    for rank in (0, 1):
        for block in range(12):
            router.block_stored(rank, block)
    assignments = routed(router, asked("a", 200, [30] * 10, range(12)))
    assert [(assignment.rank, assignment.flops) for assignment in assignments] == [(0, 158), (1, 158)]


def test_a_request_that_fits_below_the_threshold_is_not_split() -> None:
    router = make_router()
    assignments = routed(router, asked("a", 10, [30] * 3))
    assert [(assignment.rank, assignment.parts) for assignment in assignments] == [(0, None)]


def test_one_long_question_is_not_spread_over_what_it_cannot_be_cut_for() -> None:
    router = make_router()
    assignments = routed(router, asked("a", 10, [500, 5]))
    assert [(assignment.rank, assignment.parts) for assignment in assignments] == [(0, None)]


def test_labels_stay_with_their_question() -> None:
    router = make_router()
    questions = questions_of(10, [(-1, 60), (-1, 60), (0, 30), (1, 30), (3, 30)])
    assignments = routed(router, request("a", 10, questions=questions))
    assert [(assignment.parts, assignment.flops) for assignment in assignments] == [((0, 2), 100), ((1, 3, 4), 130)]


def test_a_lost_part_runs_again_alone_and_fails_all_if_it_is_lost_again() -> None:
    router = make_router(ranks=3)
    assignments = routed(router, asked("a", 10, [100] * 3))
    assert [assignment.parts for assignment in assignments] == [(0,), (1,), (2,)]
    assert router.done(assignments[0].number) == 2
    assert router.rank_lost(1).rerun == ("a",)
    (rerun,) = router.route(0.0).assignments
    assert (rerun.parts, rerun.rank) == ((1,), 0)
    (failure,) = router.rank_lost(0).failed
    assert failure.assignments == (assignments[2],)
    assert router.loads == (0, 0, 0)
    assert router.done(assignments[2].number) is None


def test_two_parts_on_one_lost_rank_fail_together() -> None:
    router = make_router(ranks=2)
    first, second = routed(router, asked("a", 10, [100] * 2))
    router.rank_lost(second.rank)
    router.done(assignments_of(router)[0].number)  # the first question
    (rerun,) = router.route(0.0).assignments
    assert (rerun.rank, rerun.parts) == (first.rank, (1,))
    assert [withdrawal.request_id for withdrawal in router.rank_lost(first.rank).failed] == ["a"]


# Simple policies


def test_round_robin_takes_turns_among_the_ranks_that_are_there() -> None:
    router = RoundRobinRouter(3, TOKENS)
    assert list(ranks_of(routed(router, *(request(f"r{number}", 1000) for number in range(4)))).values()) == [
        0,
        1,
        2,
        0,
    ]
    router.rank_lost(1)
    router.route(0.0)
    finish(router, assignments_of(router))
    assert list(ranks_of(routed(router, *(request(f"s{number}", 1) for number in range(3)))).values()) == [0, 2, 0]


def test_least_tokens_sees_tokens_and_no_prefixes() -> None:
    router = LeastTokensRouter(2, TOKENS)
    assignments = routed(router, request("a", 100, [1, 2, 3]), request("b", 60, [1, 2, 3]), request("c", 60, [1, 2, 3]))
    assert [(assignment.rank, assignment.flops) for assignment in assignments] == [(0, 100), (1, 60), (1, 12)]
    finish(router, assignments[:1])
    assert ranks_of(routed(router, asked("d", 10, [100, 100]), request("e", 5))) == {"d": 0, "e": 1}
    router.rank_lost(1)
    assert ranks_of(router.route(0.0).assignments) == {"b": 0, "c": 0, "e": 0}
