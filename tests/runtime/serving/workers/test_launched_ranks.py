"""Ranks that a launcher has started are watched, and are not restarted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moepass.models.errors import InputError
from moepass.runtime.serving.requests.backend import NotServingError
from moepass.runtime.serving.workers.frontend import Frontend
from moepass.runtime.serving.workers.supervisor import RankLostError, WatchedProcess, announce, launched_rank
from tests.helpers.serving import sum_rank
from tests.helpers.serving.sum_frontend import (
    KEY,
    NO_LIMITS,
    TIMEOUT,
    TokensFormula,
    is_right,
    make_router,
    request,
    run,
)


def launch(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, sum_rank.__file__, f"ipc://{folder}/ranks", str(rank), "0", "--step-seconds", "0.2"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"options")
    process.stdin.close()
    (folder / f"rank-{rank}").write_text(str(process.pid))
    return process


def test_a_lost_rank_of_a_launcher_ends_the_server(tmp_path: Path) -> None:
    async def work() -> None:
        frontend = Frontend(
            2,
            lambda rank, attempt: launched_rank(tmp_path, rank),
            endpoint=f"ipc://{tmp_path}/ranks",
            formula=TokensFormula(),
            make_router=make_router,
            key=KEY,
            limits=NO_LIMITS,
            ends_together=True,
            restarts=False,
        )
        processes = []
        try:
            processes += [launch(tmp_path, rank) for rank in range(2)]
            await frontend.start()
            asked = request(3, 3)
            assert is_right(asked, await frontend.answer(asked, timeout_seconds=TIMEOUT))
            losing = asyncio.create_task(frontend.lost())
            open_requests = [asyncio.create_task(frontend.answer(asked, timeout_seconds=TIMEOUT)) for _ in range(4)]
            await asyncio.sleep(0.05)
            assert not losing.done()
            processes[1].kill()
            with pytest.raises(RankLostError) as caught:
                await losing
            assert caught.value.rank == 1
            assert frontend.status().state == "no rank"
        finally:
            await frontend.close(0)
        refusals = await asyncio.gather(*open_requests, return_exceptions=True)
        assert all(isinstance(refusal, NotServingError) for refusal in refusals), refusals
        assert [process.wait(10) for process in processes] == [-9, -9]

    run(work())


def test_a_process_that_is_no_child_is_watched_and_killed(tmp_path: Path) -> None:
    async def work() -> None:
        process = subprocess.Popen(["sleep", "60"])
        watched = WatchedProcess(process.pid)
        assert watched.returncode is None
        watched.kill()
        assert await watched.wait() == 1
        process.wait()
        with pytest.raises(ProcessLookupError):
            watched.kill()
        gone = WatchedProcess(process.pid)
        assert gone.returncode == 1
        with pytest.raises(ProcessLookupError):
            gone.kill()

    run(work())


def test_a_rank_announces_its_process(tmp_path: Path) -> None:
    async def work() -> None:
        starting = asyncio.create_task(launched_rank(tmp_path, 1))
        await asyncio.sleep(0)
        announce(tmp_path, 1)
        assert (await starting).pid == os.getpid()
        (tmp_path / "rank-1").write_text("-1")
        with pytest.raises(InputError, match="-1"):
            await launched_rank(tmp_path, 1)

    run(work())
