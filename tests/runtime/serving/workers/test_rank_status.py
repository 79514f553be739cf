"""Concurrent polls share one request to each rank, and do not wait long for a silent rank."""

from __future__ import annotations

import asyncio

import pytest

from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.view import EngineView
from moepass.runtime.serving.router.routable import Assignment
from moepass.runtime.serving.workers import rank_status
from moepass.runtime.serving.workers.rank_status import RankStatusPoller, rank_views

FACTS = EngineFacts(
    "rows", 10, 1e6, 100, 50, 32, True, None, (), {"steps": "padded rows, because it is recurrent"}, 4096
)


def test_concurrent_polls_share_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        sent: list[int] = []
        poller = RankStatusPoller(sent.append)
        both = [asyncio.create_task(poller.poll([0, 1])) for _ in range(2)]
        await asyncio.sleep(0)
        assert sent == [0, 1]
        for rank in (0, 1):
            poller.report(rank, EngineView(cache_blocks=rank + 5))
        for seen in await asyncio.gather(*both):
            assert [seen[rank].cache_blocks for rank in (0, 1)] == [5, 6]
        # A fresh report is reused; later the ranks are asked again.
        assert (await poller.poll([0, 1]))[0].cache_blocks == 5
        assert sent == [0, 1]
        monkeypatch.setattr(rank_status, "FRESH_SECONDS", 0.0)
        monkeypatch.setattr(rank_status, "ANSWER_SECONDS", 0.01)
        await poller.poll([0])
        assert sent == [0, 1, 0]

    asyncio.run(work())


def test_a_silent_rank_keeps_its_last_report_and_gets_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(rank_status, "FRESH_SECONDS", 0.0)

    async def work() -> None:
        sent: list[int] = []
        poller = RankStatusPoller(sent.append)
        poller.report(0, EngineView(cache_blocks=5))  # reports without a request are accepted
        for _ in range(3):
            assert (await poller.poll([0]))[0].cache_blocks == 5
        assert sent == [0]
        poller.lost(0)
        assert 0 not in await poller.poll([])
        await poller.poll([0])
        assert sent == [0, 0]

    asyncio.run(work())


def test_a_rank_is_starting_ready_or_lost() -> None:
    assigned = [Assignment(number, "a", 1, None, 5) for number in range(3)]
    views = rank_views(3, None, {1: FACTS}, {0: 0, 1: 2, 2: 1}, assigned, {1: EngineView(cache_blocks=9)})
    assert [view.state for view in views] == ["starting", "ready", "lost"]
    assert [view.open_requests for view in views] == [0, 3, 0]
    assert [view.engine.cache_blocks for view in views] == [0, 9, 0]
    assert [bool(view.memory_bytes) for view in views] == [False, True, False]
    assert (views[1].form, views[1].form_text) == ("rows", "padded rows, because it is recurrent")
    assert (views[0].form, views[0].form_text, views[0].most_load_flops) == (None, "", None)
