"""Ranks that end again and again, as processes that do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from moepass.runtime.serving.workers import supervisor
from moepass.runtime.serving.workers.supervisor import RankProcess, Supervisor, next_pause, start_process


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = [0.0]
    while pauses[-1] != next_pause(pauses[-1]):
        pauses.append(next_pause(pauses[-1]))
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_restarted_rank_that_is_never_ready_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        ended = asyncio.Event()
        lost: list[int] = []

        def on_lost(ranks: Sequence[int]) -> None:
            lost.extend(ranks)
            if len(lost) == 2:
                ended.set()

        def start_rank(rank: int, attempt: int) -> Awaitable[RankProcess]:
            if attempt == 0:
                made.ready(rank)
            return start_process(("true",) if attempt == 0 else ("sleep", "100"), b"")

        made = Supervisor(1, start_rank, on_lost)
        await made.start()
        await asyncio.wait_for(ended.wait(), 20)
        await made.close(0)

    monkeypatch.setattr(supervisor, "LEAST_START_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.0)
    asyncio.run(work())


@pytest.mark.parametrize(("steady_seconds", "expected"), [(0.0, [0.0, 0.0]), (60.0, [0.5, 1.0])])
def test_a_steady_rank_is_restarted_without_a_pause(
    steady_seconds: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> None:
        done = asyncio.Event()

        def lost(ranks: Sequence[int]) -> None:
            if len(pauses) == 1:
                done.set()

        def start_rank(rank: int, attempt: int) -> Awaitable[RankProcess]:
            made.ready(rank)
            return start_process(("true",), b"")

        made = Supervisor(1, start_rank, lost)
        await made.start()
        await asyncio.wait_for(done.wait(), 20)
        while len(pauses) < 2:
            await real_sleep(0.01)
        await made.close(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", steady_seconds)
    monkeypatch.setattr(supervisor.asyncio, "sleep", pause)
    asyncio.run(work())
    assert pauses[:2] == expected
