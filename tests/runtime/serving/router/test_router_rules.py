"""Each rule of the router by itself, in numbers that can be followed by hand: a token costs 1, pairs cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from moepass.models.errors import InputError
from moepass.runtime.serving.router import prefix_router
from moepass.runtime.serving.router.decisions import Assignment, RankLoss
from moepass.runtime.serving.router.open_work import Work
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import RoutablePart, RoutableRequest, questions_of
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.router.simple_routers import LeastTokensRouter, RoundRobinRouter
from moepass.runtime.serving.router.waiting_queue import WaitingQueue
from tests.helpers.serving.router_oracle import LinearAndPairs

TOKENS = LinearAndPairs(per_token=1, per_pair=0)


def router(ranks: int = 2, saturation: int = 100, **options: Any) -> PrefixRouter:
    return PrefixRouter(ranks, TOKENS, saturation_flops=saturation, flops_per_second=10.0, **options)


def request(name: str, tokens: int, blocks: Sequence[int | bytes] = (), **options: Any) -> RoutableRequest:
    return RoutableRequest(name, tuple(blocks), tokens, **options)


def asked(name: str, prompt: int, questions: Sequence[int], blocks: Sequence[int] = ()) -> RoutableRequest:
    return request(name, prompt, blocks, parts=tuple(RoutablePart(-1, tokens) for tokens in questions))


def places(assignments: Sequence[Assignment]) -> dict[str, int]:
    return {assignment.request_id: assignment.rank for assignment in assignments}


def routed(at: RankRouter, *requests: RoutableRequest, now: float = 0.0) -> list[Assignment]:
    for one in requests:
        at.submit(one)
    return at.route(now).assignments


def finish(at: RankRouter, assignments: Sequence[Assignment]) -> None:
    for assignment in assignments:
        assert at.started(assignment.number)
        assert at.done(assignment.number) is not None


# Loads and saturation


def test_what_is_added_is_taken_away() -> None:
    # Beyond what floats tell apart.
    exact = LinearAndPairs(per_token=10**17 + 1, per_pair=1)
    at = PrefixRouter(2, exact, saturation_flops=10**30, flops_per_second=1e15)
    assignments = routed(at, *(request(f"r{number}", 1 + number) for number in range(7)))
    assert sum(at.loads) == 28 * (10**17 + 1) + 84
    for assignment in assignments:
        assert at.done(assignment.number) == 0
    assert at.loads == (0, 0)
    assert at.requests == ()


def test_a_round_fills_every_rank_to_the_threshold_and_no_further() -> None:
    at = router(ranks=3)
    assignments = routed(at, *(request(f"r{number}", 30) for number in range(20)))
    assert at.loads == (120, 120, 120)
    assert len(assignments) == 12
    assert (at.waiting, at.waiting_flops) == (8, 240)
    assert at.route(1.0).assignments == []


def test_a_rank_takes_work_again_when_its_load_falls_below_the_threshold() -> None:
    at = router(ranks=1)
    first, second = routed(at, request("a", 60), request("b", 60), request("c", 60))
    assert at.done(first.number) == 0
    assert places(at.route(0.0).assignments) == {"c": 0}
    assert at.loads == (120,)
    assert second.flops == 60


def test_an_answer_counts_once() -> None:
    at = router()
    (assignment,) = routed(at, request("a", 5))
    assert at.started(assignment.number)
    assert at.done(assignment.number) == 0
    assert at.done(assignment.number) is None
    assert not at.started(assignment.number)
    assert at.cancel("a") is None


# Shared prefixes


def test_arrivals_of_one_round_share_what_the_first_one_brings() -> None:
    at = router(saturation=1000)
    blocks = range(1, 5)
    assignments = routed(at, *(request(name, 70, blocks) for name in "abc"))
    assert [(one.rank, one.shared_tokens, one.flops) for one in assignments] == [(0, 0, 70), (0, 64, 6), (0, 64, 6)]
    assert at.tables.pending == {block: {0: 3} for block in blocks}
    finish(at, assignments)
    assert at.tables.pending == {}
    assert at.loads == (0, 0)


def test_only_the_prefix_that_is_shared_counts() -> None:
    at = router(saturation=1000)
    assignments = routed(at, request("a", 70, [1, 2, 3, 4]), request("b", 70, [1, 2, 30, 40]), request("c", 70, [9]))
    assert [(one.rank, one.shared_tokens) for one in assignments] == [(0, 0), (0, 32), (1, 0)]


def test_the_most_blocks_win_and_ties_go_to_the_least_loaded() -> None:
    at = router(ranks=4, saturation=1000)
    routed(at, request("load", 50))
    for rank in (0, 1, 2):
        at.block_stored(rank, 1)
    at.block_stored(2, 2)
    assert places(routed(at, request("deep", 40, [1, 2]))) == {"deep": 2}
    assert places(routed(at, request("tie", 40, [1, 7]))) == {"tie": 1}
    assert places(routed(at, request("none", 40, [8, 9]))) == {"none": 3}


def test_stored_and_promised_blocks_make_one_prefix() -> None:
    at = router(saturation=1000)
    (first,) = routed(at, request("first", 70, [1, 2, 3]))
    at.block_stored(0, 1)
    at.block_stored(1, 1)
    assert [(one.rank, one.shared_tokens) for one in routed(at, request("next", 70, [1, 2, 3, 4]))] == [(0, 48)]
    assert first.rank == 0


def test_an_evicted_block_is_no_match() -> None:
    at = router(saturation=1000)
    for block in (1, 2):
        at.block_stored(1, block)
    at.block_evicted(1, 2)
    assert [(one.rank, one.shared_tokens) for one in routed(at, request("a", 70, [1, 2]))] == [(1, 16)]
    at.block_evicted(1, 1)
    at.block_evicted(1, 1)
    assert at.tables.committed == {}


def test_without_a_cache_only_work_that_has_not_begun_shares() -> None:
    at = router(saturation=1000, keeps_blocks=False)
    first, second = routed(at, request("a", 70, [1, 2]), request("b", 70, [1, 2]))
    assert (first.shared_tokens, second.shared_tokens) == (0, 32)
    at.started(first.number)
    assert at.tables.pending == {1: {0: 1}, 2: {0: 1}}
    at.started(second.number)
    at.started(second.number)
    assert at.tables.pending == {}
    assert [(one.rank, one.shared_tokens) for one in routed(at, request("c", 70, [1, 2]))] == [(1, 0)]
    finish(at, at.assignments)
    assert at.loads == (0, 0)


# Waiting for a saturated rank, or spilling


def test_other_work_goes_before_work_whose_prefix_a_saturated_rank_has() -> None:
    at = router()
    hot = [request(f"hot{number}", 68, [1, 2, 3, 4]) for number in range(12)]
    assignments = routed(at, *hot, *(request(f"other{number}", 50) for number in range(3)))
    # 68 + 8·4 = 100 saturate rank 0; three more wait for it, and the others fill rank 1.
    assert places(assignments) == {**{f"hot{number}": 0 for number in range(9)}, "other0": 1, "other1": 1}
    finish(at, [one for one in assignments if one.rank == 0])
    for block in (1, 2, 3, 4):
        at.block_stored(0, block)
    # Of equal urgency are hot9 to hot11, which came first, and other2.
    assert places(at.route(1.0).assignments) == {"hot9": 0, "hot10": 0, "hot11": 0, "other2": 0}


def test_a_hot_prefix_spills_where_a_rank_has_nothing_else_to_do() -> None:
    at = router()
    assignments = routed(at, *(request(f"hot{number}", 68, [1, 2, 3, 4]) for number in range(12)))
    spilled = [one for one in assignments if one.rank == 1]
    assert [(one.request_id, one.flops) for one in spilled] == [("hot9", 68), ("hot10", 4), ("hot11", 4)]
    # From now on both have it.
    assert at.tables.pending == {block: {0: 9, 1: 3} for block in (1, 2, 3, 4)}


def test_work_is_passed_over_for_as_long_as_the_saturated_rank_needs_by_the_plan() -> None:
    """100 FLOPs at 10 a second: what comes up to 10 s later goes first."""

    def first_on_rank_one(arrived: float) -> list[str]:
        at = router()
        routed(at, request("load", 100, [1, 2]), request("fill", 100))
        at.submit(request("hot", 40, [1, 2]))
        at.route(0.0)
        finish(at, [one for one in at.assignments if one.rank == 1])
        for name in ("x", "y"):
            at.submit(request(name, 60, arrived=arrived))
        return [one.request_id for one in at.route(arrived).assignments]

    assert first_on_rank_one(9.0) == ["x", "y"]
    assert first_on_rank_one(11.0) == ["hot", "x"]


def test_a_part_waits_for_the_rank_that_the_whole_waited_for() -> None:
    """It has the place of the whole, which another rank took meanwhile. The entry of the whole is still there."""
    waiting = WaitingQueue(2)
    both = asked("a", 40, [5, 7], blocks=(1,))
    whole = Work(both, (0.0, 1, 0), 40, questions_of(both, TOKENS), 52)
    waiting.park(whole, 0, 1.0)
    assert waiting.pop(0b10) is whole
    part = whole.part(whole.questions[:1])
    waiting.park(part, 0, 1.0)
    assert waiting.pop(0b01) is part
    assert waiting.pop(0b11) is None
    assert (waiting.count, waiting.flops) == (0, 0)


def test_a_prefix_that_takes_longer_than_the_wait_is_never_computed_again() -> None:
    at = router()
    for block in range(20):
        at.block_stored(0, block)
    routed(at, request("load", 100, range(100, 101)), request("fill", 100))
    (held, fill) = at.assignments
    document = request("document", 330, range(20))
    assert places([held, fill]) == {"load": 0, "fill": 1}
    finish(at, [fill])
    assert routed(at, document) == []  # 320 to compute, and rank 0 has 100 to do
    assert at.route(1000.0).assignments == []
    finish(at, [held])
    assert [(one.rank, one.flops) for one in at.route(1001.0).assignments] == [(0, 10)]


def test_work_that_waits_for_a_rank_goes_elsewhere_when_that_is_lost() -> None:
    at = router()
    for block in range(20):
        at.block_stored(0, block)
    routed(at, request("load", 100), request("document", 330, range(20)), request("fill", 100))
    assert places(at.assignments) == {"load": 0, "fill": 1}
    finish(at, [at.assignments[1]])
    assert at.rank_lost(0) == RankLoss(("load",), ())
    assert [(one.request_id, one.rank, one.flops) for one in at.route(0.0).assignments] == [("load", 1, 100)]
    finish(at, at.assignments)
    assert [(one.request_id, one.rank, one.flops) for one in at.route(0.0).assignments] == [("document", 1, 330)]


def test_who_would_be_late_does_not_wait() -> None:
    """The holder needs 10 s for what it has, and 4 FLOPs of the request's own take 0.4 s."""

    def waits(deadline: float) -> bool:
        at = router()
        routed(at, request("load", 100, [1, 2]))
        at.submit(request("hot", 36, [1, 2], deadline=deadline))
        at.submit(request("other", 100))
        return "hot" not in places(at.route(0.0).assignments)

    assert waits(10.4)
    assert waits(math.inf)
    assert not waits(10.3)


def test_a_round_passes_over_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MOST_PASSED_OVER", 2)
    at = router()
    routed(at, request("load", 100, [1, 2]))
    assignments = routed(at, *(request(f"hot{number}", 50, [1, 2]) for number in range(4)), request("other", 100))
    assert [one.request_id for one in assignments] == ["hot2", "hot3", "other"]
    assert {one.rank for one in assignments} == {1}


# Order


def test_higher_priorities_come_first_and_waiting_makes_up_for_them() -> None:
    at = router(ranks=1, saturation=1, priority_seconds=5.0)
    for one in (
        request("old", 10, arrived=0.0),
        request("new", 10, arrived=4.0),
        request("urgent", 10, arrived=4.0, priority=1),
        request("late", 10, arrived=6.0, priority=1),
        request("later", 10, arrived=4.5, priority=-1),
    ):
        at.submit(one)
    order = []
    while at.requests:
        (assignment,) = at.route(10.0).assignments
        order.append(assignment.request_id)
        finish(at, [assignment])
    # By arrived - 5 · priority: -1, 0, 1, 4, 9.5.
    assert order == ["urgent", "old", "late", "new", "later"]


def test_what_was_lost_keeps_its_place() -> None:
    at = router(ranks=1, saturation=1)
    routed(at, request("a", 10), request("b", 10))
    at.rank_lost(0)
    at.rank_back(0)
    assert places(at.route(0.0).assignments) == {"a": 0}


# Ends


def test_a_request_expires_unless_all_of_it_has_started() -> None:
    at = router(ranks=1, saturation=30)
    started, assigned, _ = routed(
        at,
        *(request(name, 10, deadline=5.0) for name in ("started", "assigned", "done")),
        request("waiting", 10, deadline=5.0),
        request("patient", 10, deadline=5.1),
    )
    at.started(started.number)
    at.done(3)
    made = at.route(5.0)
    assert [(one.request_id, one.assignments) for one in made.expired] == [
        ("assigned", (assigned,)),
        ("waiting", ()),
    ]
    assert places(made.assignments) == {"patient": 0}
    assert at.done(assigned.number) is None
    assert at.done(started.number) == 0
    assert at.loads == (10,)


def test_the_deadline_of_a_request_is_not_that_of_the_next_with_its_id() -> None:
    at = router()
    finish(at, routed(at, request("a", 10, deadline=5.0)))
    at.rank_lost(0)
    at.rank_lost(1)
    at.submit(request("a", 10, deadline=9.0))
    assert at.route(6.0).expired == []
    assert [one.request_id for one in at.route(9.0).expired] == ["a"]


def test_a_request_of_which_the_rest_has_started_does_not_expire() -> None:
    at = router()
    one = RoutableRequest("a", (), 10, tuple(RoutablePart(-1, 30) for _ in range(10)), deadline=5.0)
    first, second = routed(at, one)
    assert at.done(first.number) == 1  # whoever is done has started
    at.started(second.number)
    assert at.route(6.0).expired == []
    assert at.done(second.number) == 0


def test_what_runs_again_expires_as_well() -> None:
    at = router(ranks=1)
    (assignment,) = routed(at, request("a", 10, deadline=5.0))
    at.started(assignment.number)
    assert at.route(6.0).expired == []
    at.rank_lost(0)
    assert [one.request_id for one in at.route(6.0).expired] == ["a"]
    assert at.requests == ()


@pytest.mark.parametrize("state", ["waiting", "parked", "assigned", "started"])
def test_a_request_is_cancelled_in_any_state(state: str) -> None:
    at = router()
    if state == "waiting":
        routed(at, request("load0", 100), request("load1", 100))
    if state == "parked":
        routed(at, request("load0", 100, [1, 2]))
    assignments = routed(at, request("a", 40, [1, 2]), request("other", 100))
    if state == "started":
        at.started(assignments[0].number)
    before = sum(at.loads)
    withdrawal = at.cancel("a")
    assert withdrawal is not None
    mine = tuple(one for one in assignments if one.request_id == "a")
    assert withdrawal.assignments == mine
    assert len(mine) == (state in ("assigned", "started"))
    assert sum(at.loads) == before - sum(one.flops for one in mine)
    assert "a" not in at.requests
    finish(at, at.assignments)
    finish(at, at.route(0.0).assignments)
    assert (at.loads, at.waiting, at.waiting_flops, at.tables.pending) == ((0, 0), 0, 0, {})


# Ranks that come and go


def test_a_request_survives_one_lost_rank_and_no_second() -> None:
    at = router()
    (first,) = routed(at, request("a", 10))
    assert at.rank_lost(first.rank) == RankLoss(("a",), ())
    assert at.rank_lost(first.rank) == RankLoss((), ())
    assert at.done(first.number) is None
    (second,) = at.route(0.0).assignments
    assert (second.request_id, second.attempt, second.rank) == ("a", 2, 1 - first.rank)
    loss = at.rank_lost(second.rank)
    assert (loss.rerun, [one.request_id for one in loss.failed]) == ((), ["a"])
    assert (at.requests, at.loads, at.tables.pending) == ((), (0, 0), {})


def test_a_lost_rank_has_no_blocks_and_gets_no_work_until_it_is_back() -> None:
    at = router()
    for block in (1, 2):
        at.block_stored(0, block)
    at.rank_lost(0)
    at.block_stored(0, 3)  # was under way
    at.block_evicted(0, 1)
    assert at.tables.committed == {}
    assert places(routed(at, request("a", 40, [1, 2]), request("b", 70))) == {"a": 1, "b": 1}
    at.rank_back(0)
    at.rank_back(0)
    assert [(one.rank, one.shared_tokens) for one in routed(at, request("c", 40, [1, 2]))] == [(0, 0)]


def test_all_ranks_may_be_lost_and_work_waits_for_one() -> None:
    at = router()
    at.rank_lost(0)
    at.rank_lost(1)
    assert routed(at, request("a", 10)) == []
    at.rank_back(1)
    assert places(at.route(0.0).assignments) == {"a": 1}


# Questions


def test_many_questions_are_split_where_that_pays() -> None:
    """10 of a prompt and 300 of questions: 160 and 160 end 150 earlier than 310, and cost 10."""
    at = router()
    assignments = routed(at, asked("a", 10, [30] * 10))
    assert [(one.rank, one.parts, one.flops) for one in assignments] == [
        (0, (0, 1, 2, 3, 4), 160),
        (1, (5, 6, 7, 8, 9), 160),
    ]
    first, second = assignments
    assert at.done(first.number) == 1
    assert at.requests == ("a",)
    assert at.done(second.number) == 0
    assert at.loads == (0, 0)


def test_many_questions_stay_together_where_the_prompt_costs_more_than_the_split_saves() -> None:
    at = router()
    assignments = routed(at, asked("a", 200, [30] * 10))  # 350 and 350 instead of 500: 150 earlier for 200
    assert [(one.rank, one.parts, one.flops) for one in assignments] == [(0, None, 500)]


def test_many_questions_are_split_where_the_others_have_the_prompt() -> None:
    at = router()
    for rank in (0, 1):
        for block in range(12):
            at.block_stored(rank, block)
    assignments = routed(at, asked("a", 200, [30] * 10, range(12)))
    assert [(one.rank, one.shared_tokens, one.flops) for one in assignments] == [(0, 192, 158), (1, 192, 158)]


def test_a_request_that_fits_below_the_threshold_is_not_split() -> None:
    at = router()
    assignments = routed(at, asked("a", 10, [30] * 3))
    assert [(one.rank, one.parts) for one in assignments] == [(0, None)]


def test_one_long_question_is_not_spread_over_what_it_cannot_be_cut_for() -> None:
    at = router()
    assignments = routed(at, asked("a", 10, [500, 5]))
    assert [(one.rank, one.parts) for one in assignments] == [(0, None)]


def test_labels_stay_with_their_question() -> None:
    at = router()
    parts = (RoutablePart(-1, 60), RoutablePart(-1, 60), RoutablePart(0, 30), RoutablePart(1, 30), RoutablePart(3, 30))
    assignments = routed(at, request("a", 10, parts=parts))
    assert [(one.parts, one.flops) for one in assignments] == [((0, 2), 100), ((1, 3, 4), 130)]


def test_a_lost_part_runs_again_alone_and_fails_all_if_it_is_lost_again() -> None:
    at = router(ranks=3)
    assignments = routed(at, asked("a", 10, [100] * 3))
    assert [one.parts for one in assignments] == [(0,), (1,), (2,)]
    assert at.done(assignments[0].number) == 2
    assert at.rank_lost(1).rerun == ("a",)
    (again,) = at.route(0.0).assignments
    assert (again.parts, again.attempt, again.rank) == ((1,), 2, 0)
    (failure,) = at.rank_lost(0).failed
    assert failure.assignments == (assignments[2],)
    assert at.loads == (0, 0, 0)
    assert at.done(assignments[2].number) is None


def test_two_parts_on_one_lost_rank_fail_together() -> None:
    at = router(ranks=2)
    first, second = routed(at, asked("a", 10, [100] * 2))
    at.rank_lost(second.rank)
    at.done(at.assignments[0].number)  # the first part
    (again,) = at.route(0.0).assignments
    assert (again.rank, again.attempt, again.parts) == (first.rank, 2, (1,))
    assert [one.request_id for one in at.rank_lost(first.rank).failed] == ["a"]


# Simple policies


def test_round_robin_takes_turns_among_the_ranks_that_are_there() -> None:
    at = RoundRobinRouter(3, TOKENS)
    assert list(places(routed(at, *(request(f"r{number}", 1000) for number in range(4)))).values()) == [0, 1, 2, 0]
    at.rank_lost(1)
    at.route(0.0)
    finish(at, at.assignments)
    assert list(places(routed(at, *(request(f"s{number}", 1) for number in range(3)))).values()) == [0, 2, 0]


def test_least_tokens_sees_tokens_and_no_prefixes() -> None:
    at = LeastTokensRouter(2, TOKENS)
    assignments = routed(at, request("a", 100, [1, 2, 3]), request("b", 60, [1, 2, 3]), request("c", 60, [1, 2, 3]))
    assert [(one.rank, one.flops) for one in assignments] == [(0, 100), (1, 60), (1, 12)]
    finish(at, assignments[:1])
    assert places(routed(at, asked("d", 10, [100, 100]), request("e", 5))) == {"d": 0, "e": 1}
    at.rank_lost(1)
    assert places(at.route(0.0).assignments) == {"b": 0, "c": 0, "e": 0}


# What is wrong is said


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("prompt_tokens", lambda: request("a", 0)),
        ("blocks", lambda: request("a", 32, [1, 2])),
        ("blocks", lambda: request("a", 31, [1, 2], parts=(RoutablePart(-1, 1),))),
        ("tokens", lambda: request("a", 5, parts=(RoutablePart(-1, 0),))),
        ("parent", lambda: request("a", 5, parts=(RoutablePart(0, 1),))),
        ("arrived", lambda: request("a", 5, arrived=math.nan)),
        ("deadline", lambda: request("a", 5, deadline=math.nan)),
        ("ranks", lambda: router(ranks=0)),
        ("saturation_flops", lambda: router(saturation=0)),
        ("priority_seconds", lambda: router(priority_seconds=-1.0)),
        ("flops_per_second", lambda: PrefixRouter(1, TOKENS, saturation_flops=1, flops_per_second=0.0)),
        ("rank", lambda: router().rank_lost(2)),
        ("rank", lambda: router().block_stored(-1, 5)),
    ],
)
def test_errors_name_what_is_wrong(name: str, build: Any) -> None:
    with pytest.raises(InputError) as raised:
        build()
    assert raised.value.name == name
    assert str(raised.value)


def test_an_id_is_used_once_at_a_time() -> None:
    at = router()
    at.submit(request("a", 5))
    with pytest.raises(InputError, match="request a is there already"):
        at.submit(request("a", 5))
    finish(at, at.route(0.0).assignments)
    at.submit(request("a", 5))


def test_whole_blocks_of_a_prompt_may_come_from_a_cache_where_something_follows() -> None:
    assert request("a", 32, [1, 2], parts=(RoutablePart(-1, 1),)).blocks == (1, 2)
    assert request("a", 33, [1, 2]).blocks == (1, 2)
