"""Topics between threads that play ranks: all ranks learn all votes, or all get one error that names what differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from moepass.runtime.ranks.agree import DisagreementError, Topic, agree, agree_on_run, check_equal
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from tests.helpers.graphs.error_fields import refused

T = TypeVar("T")
VALUES = st.one_of(st.integers(0, 2), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), max_size=2))


def _on_ranks(ranks: int, function: Callable[[int], T]) -> list[T | PeerError]:
    def run(rank: int) -> T | PeerError:
        try:
            return function(rank)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def _connected(ranks: int) -> list[Connections]:
    store = HashStore()

    def connect(rank: int) -> Connections:
        return Connections(Rendezvous(store, rank, ranks, 20, "come"), "test", "a test")

    found = _on_ranks(ranks, connect)
    return [one for one in found if isinstance(one, Connections)]


def _topics(own: dict[str, Any], vote: int) -> list[Topic]:
    topics = [Topic(name, own[name], f"mend {name}") for name in ("size", "name")]
    return [*topics, Topic("vote", vote, is_vote=True)]


def _check(outcomes: list[Any], values: list[dict[str, Any]]) -> None:
    """What must come of it: the first topic on which a rank differs from the first, in the order of ranks or topics."""
    different = {name: {rank: own[name] for rank, own in enumerate(values)} for name in values[0]}
    wrong = {name for name, by_rank in different.items() if any(value != by_rank[0] for value in by_rank.values())}
    if not wrong:
        assert outcomes == [[10 * rank for rank in range(len(values))]] * len(values)
        return
    assert all(isinstance(outcome, DisagreementError) for outcome in outcomes), outcomes
    assert len({(str(outcome), outcome.name, outcome.ranks) for outcome in outcomes}) == 1
    told = outcomes[0]
    first, other = told.ranks
    assert told.name in wrong
    assert str(values[first][told.name]) == str(told.values[first]) != str(told.values[other])
    assert str(values[other][told.name]) == str(told.values[other])
    assert str(told).endswith(f"; mend {told.name}")


_OF_RANKS = st.lists(st.fixed_dictionaries({"size": VALUES, "name": VALUES}), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(_OF_RANKS)
def test_a_meeting_gives_all_votes_or_one_error(values: list[dict[str, Any]]) -> None:
    store = HashStore()

    def run(rank: int) -> list[int]:
        meeting = Rendezvous(store, rank, len(values), 20, "come")
        return [votes["vote"] for _, votes in agree(meeting, "words", _topics(values[rank], 10 * rank))]

    _check(_on_ranks(len(values), run), values)


@settings(max_examples=15, deadline=None)
@given(_OF_RANKS)
def test_before_a_run_all_votes_or_one_error_for_good(values: list[dict[str, Any]]) -> None:
    connections = _connected(len(values))

    def run(rank: int) -> list[float]:
        topics = _topics(values[rank], 10 * rank)
        return [vote for (vote,) in agree_on_run(connections[rank], topics, time.monotonic() + 20, "late", "lost")]

    outcomes = _on_ranks(len(values), run)
    _check(outcomes, values)
    if isinstance(outcomes[0], PeerError):
        for connection in connections:
            with pytest.raises(PeerError) as told:
                connection.check()
            assert str(told.value) == str(outcomes[0])
            assert told.value.ranks == outcomes[0].ranks


def test_who_has_no_value_has_no_part_in_the_comparison_before_a_run() -> None:
    connections = _connected(3)

    def run(values: list[object]) -> list[Any]:
        topics = [[Topic("plan", value, "mend")] for value in values]
        deadline = time.monotonic() + 20
        return _on_ranks(3, lambda rank: agree_on_run(connections[rank], topics[rank], deadline, "late", "lost"))

    assert run([None, "a", "a"]) == [[[], [], []]] * 3
    assert run([None, None, None]) == [[[], [], []]] * 3
    for error in run([None, "a", "b"]):
        assert (error.name, error.values, error.ranks) == ("plan", {1: "a", 2: "b"}, (1, 2))


def test_values_that_read_alike_are_told_apart() -> None:
    connections = _connected(2)
    values = [1, "1"]

    def run(rank: int) -> object:
        return agree_on_run(connections[rank], [Topic("it", values[rank])], time.monotonic() + 20, "late", "lost")

    for error in _on_ranks(2, run):
        assert isinstance(error, DisagreementError)
        assert error.ranks == (0, 1)
        assert all(str(value).startswith("1 (digest ") for value in error.values.values())


def test_an_interrupt_in_the_middle_ends_the_connections() -> None:
    connections = _connected(2)
    with mock.patch.object(Connections, "exchange", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        agree_on_run(connections[0], [Topic("it", 1)], time.monotonic() + 20, "late", "they agreed")
    with pytest.raises(PeerError, match="rank 0 was interrupted while they agreed: KeyboardInterrupt"):
        connections[0].check()
    with refused(PeerError, rank=0):
        agree_on_run(connections[1], [Topic("it", 1)], time.monotonic() + 1, "late", "they agreed")


def test_only_those_are_compared_that_have_a_value() -> None:
    check_equal("it", {}, "mend")
    check_equal("it", {3: 1, 5: 1}, "mend")
    with pytest.raises(DisagreementError, match=r"^ranks disagree on it: 1 on rank 3, 2 on rank 7; mend$") as told:
        check_equal("it", {7: 2, 3: 1, 5: 1}, "mend")
    assert told.value.values == {3: 1, 5: 1, 7: 2}
