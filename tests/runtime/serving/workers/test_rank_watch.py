"""Ranks count as hung after silence or after a step that is much longer than predicted."""

from __future__ import annotations

import dataclasses

from moepass.runtime.serving.workers.rank_watch import CHECK_SECONDS, HangLimits, RankWatch
from tests.helpers.serving.sum_rank import SumEngine

# A full step takes 40 of 1000 FLOPs per second.
FACTS = {0: SumEngine.facts}


def check_regularly(watch: RankWatch, begin: float, end: float) -> dict[int, str]:
    """Check from `begin` to `end` at the usual interval, and return the ranks that hang at the last check."""
    reasons: dict[int, str] = {}
    for number in range(round((end - begin) / CHECK_SECONDS) + 1):
        reasons = watch.hung(begin + number * CHECK_SECONDS, FACTS)
    return reasons


def ready_rank(limits: HangLimits | None = None) -> RankWatch:
    watch = RankWatch(limits or HangLimits())
    watch.begin(0, 100.0)
    return watch


def test_silence_is_a_hang_until_the_next_message() -> None:
    watch = ready_rank()
    assert check_regularly(watch, 100.0, 110.0) == {}
    watch.message_received(0, 110.0, 0.0)
    assert check_regularly(watch, 110.5, 120.0) == {}
    assert "no message for 10.5 seconds" in check_regularly(watch, 120.5, 120.5)[0]


def test_a_pause_of_the_caller_is_not_silence() -> None:
    watch = ready_rank()
    assert check_regularly(watch, 100.0, 105.0) == {}
    assert watch.hung(1000.0, FACTS) == {}
    assert check_regularly(watch, 1000.5, 1004.0) == {}
    assert 0 in check_regularly(watch, 1004.5, 1005.5)


def test_a_step_may_take_what_its_flops_predict() -> None:
    watch = ready_rank()
    for number, flops in (("1", 1), ("2", 6000), ("3", 1)):
        watch.assigned(0, number, flops)
    watch.started(0, ("2",))  # assignment 1 was cancelled before
    watch.message_received(0, 100.5, 119.5)
    assert watch.hung(100.5, FACTS) == {}  # 6 seconds are predicted
    watch.message_received(0, 101.0, 120.5)
    assert "120.5 seconds; 6 seconds are predicted, and the limit is 120.0 seconds" in watch.hung(101.0, FACTS)[0]
    watch.message_received(0, 101.5)
    watch.started(0, ("3", "unknown"))
    watch.message_received(0, 102.0, 29.0)
    assert watch.hung(102.0, FACTS) == {}
    watch.message_received(0, 102.5, 31.0)
    assert 0 in watch.hung(102.5, FACTS)


def test_a_small_step_may_take_as_long_as_a_full_step() -> None:
    slow = {0: dataclasses.replace(SumEngine.facts, flops_per_second=10.0)}
    watch = ready_rank()
    watch.message_received(0, 100.5, 79.0)
    assert watch.hung(100.5, slow) == {}
    watch.message_received(0, 101.0, 81.0)
    assert 0 in watch.hung(101.0, slow)


def test_starting_and_lost_ranks_are_not_watched() -> None:
    watch = ready_rank()
    watch.forget(0)
    watch.message_received(0, 100.0, 99.0)
    watch.assigned(0, "1", 5)
    watch.started(0, ("1",))
    assert check_regularly(watch, 100.0, 200.0) == {}
