"""Topics compared between threads as ranks: all ranks learn all votes, or all get one error about the difference."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from moepass.runtime.ranks.agree import DisagreementError, Topic, agree, agree_on_run, check_equal
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.rank_threads import on_rank_threads

VALUES = st.one_of(st.integers(0, 2), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), max_size=2))


def _connected(ranks: int) -> list[Connections]:
    store = HashStore()

    def connect(rank: int) -> Connections:
        return Connections(Rendezvous(store, rank, ranks, 20, "come"), "test", "a test")

    outcomes = on_rank_threads(ranks, connect)
    return [outcome for outcome in outcomes if isinstance(outcome, Connections)]


def _topics(own: dict[str, Any], vote: int) -> list[Topic]:
    topics = [Topic(name, own[name], f"mend {name}") for name in ("size", "name")]
    return [*topics, Topic("vote", vote, is_vote=True)]


def _check(outcomes: list[Any], values: list[dict[str, Any]]) -> None:
    """Check the error: it names the first topic on which a rank differs from rank 0, in order of ranks or topics."""
    different = {name: {rank: topics[name] for rank, topics in enumerate(values)} for name in values[0]}
    wrong = {name for name, by_rank in different.items() if any(value != by_rank[0] for value in by_rank.values())}
    if not wrong:
        assert outcomes == [[10 * rank for rank in range(len(values))]] * len(values)
        return
    assert all(isinstance(outcome, DisagreementError) for outcome in outcomes), outcomes
    assert len({(str(outcome), outcome.name, outcome.ranks) for outcome in outcomes}) == 1
    error = outcomes[0]
    first, second = error.ranks
    assert error.name in wrong
    assert str(values[first][error.name]) == str(error.values[first]) != str(error.values[second])
    assert str(values[second][error.name]) == str(error.values[second])
    assert str(error).endswith(f"; mend {error.name}")


_OF_RANKS = st.lists(st.fixed_dictionaries({"size": VALUES, "name": VALUES}), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(_OF_RANKS)
def test_a_meeting_gives_all_votes_or_one_error(values: list[dict[str, Any]]) -> None:
    store = HashStore()

    def run(rank: int) -> list[int]:
        meeting = Rendezvous(store, rank, len(values), 20, "come")
        return [votes["vote"] for _, votes in agree(meeting, "words", _topics(values[rank], 10 * rank))]

    _check(on_rank_threads(len(values), run), values)


@settings(max_examples=15, deadline=None)
@given(_OF_RANKS)
def test_before_a_run_all_votes_or_one_error_for_good(values: list[dict[str, Any]]) -> None:
    connections = _connected(len(values))

    def run(rank: int) -> list[float]:
        topics = _topics(values[rank], 10 * rank)
        return [vote for (vote,) in agree_on_run(connections[rank], topics, time.monotonic() + 20, "late", "lost")]

    outcomes = on_rank_threads(len(values), run)
    _check(outcomes, values)
    if isinstance(outcomes[0], PeerError):
        for connection in connections:
            with pytest.raises(PeerError) as caught:
                connection.check()
            assert str(caught.value) == str(outcomes[0])
            assert caught.value.ranks == outcomes[0].ranks


def test_who_has_no_value_has_no_part_in_the_comparison_before_a_run() -> None:
    connections = _connected(3)

    def run(values: list[object]) -> list[Any]:
        topics = [[Topic("plan", value, "mend")] for value in values]
        deadline = time.monotonic() + 20
        return on_rank_threads(3, lambda rank: agree_on_run(connections[rank], topics[rank], deadline, "late", "lost"))

    assert run([None, "a", "a"]) == [[[], [], []]] * 3
    assert run([None, None, None]) == [[[], [], []]] * 3
    for error in run([None, "a", "b"]):
        assert (error.name, error.values, error.ranks) == ("plan", {1: "a", 2: "b"}, (1, 2))


def test_different_values_with_equal_texts_are_distinguished() -> None:
    connections = _connected(2)
    values = [1, "1"]

    def run(rank: int) -> object:
        return agree_on_run(connections[rank], [Topic("it", values[rank])], time.monotonic() + 20, "late", "lost")

    for error in on_rank_threads(2, run):
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
    with pytest.raises(DisagreementError, match=r"^ranks disagree on it: 1 on rank 3, 2 on rank 7; mend$") as caught:
        check_equal("it", {7: 2, 3: 1, 5: 1}, "mend")
    assert caught.value.values == {3: 1, 5: 1, 7: 2}
