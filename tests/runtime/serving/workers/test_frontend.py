"""Frontend and ranks as real processes: every request gets one answer, even if ranks end or hang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from moepass.models.errors import InputError
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import AnswerTimeoutError, FrontendLimits, NotServingError, QueueFullError
from moepass.runtime.serving.requests.request import Request, TokenPiece
from moepass.runtime.serving.requests.view import BackendView, EngineView
from moepass.runtime.serving.workers.frontend import Frontend
from moepass.runtime.serving.workers.messages import RankReady, StatusReport, encode
from moepass.runtime.serving.workers.rank_watch import HangLimits
from moepass.runtime.serving.workers.supervisor import RankStartError
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
    serving,
    slow,
)


def test_a_ready_rank_is_shown_while_others_start(tmp_path: Path) -> None:
    async def work() -> None:
        def start_rank(rank: int, attempt: int) -> NoReturn:
            raise AssertionError("no rank is started")

        endpoint = f"ipc://{tmp_path}/ranks"
        frontend = Frontend(
            2,
            start_rank,
            endpoint=endpoint,
            formula=TokensFormula(),
            make_router=make_router,
            key=KEY,
            limits=NO_LIMITS,
        )
        frontend._handle_message(0, encode(RankReady(sum_rank.SumEngine.facts)))
        viewing = asyncio.create_task(frontend.view())
        await asyncio.sleep(0)
        frontend._handle_message(0, encode(StatusReport(EngineView(cache_blocks=3))))
        ranks = (await viewing).ranks
        assert [(rank.state, rank.engine.cache_blocks) for rank in ranks] == [("ready", 3), ("starting", 0)]
        frontend._context.destroy(linger=0)

    run(work())


def test_every_request_gets_its_own_answer(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path) as frontend:
            asked = [request(number, number % 40) for number in range(120)]
            answers = await asyncio.gather(*(frontend.answer(item, timeout_seconds=TIMEOUT) for item in asked))
            assert all(map(is_right, asked, answers))
            assert frontend.status().metrics["answered"] == 120
            assert frontend._router is not None
            assert frontend._router.loads == (0, 0)
            assert frontend._open_bytes == 0
            check_view(await frontend.view(), answers)

    run(work())


def check_view(view: BackendView, answers: list[Answer]) -> None:
    """Check the view of two idle ranks that have given these answers."""
    assert [(rank.state, rank.load_flops, rank.open_requests) for rank in view.ranks] == [("ready", 0, 0)] * 2
    assert {rank.most_load_flops for rank in view.ranks} == {2 * sum_rank.STEP_TOKENS}
    assert (view.running, view.waiting) == (0, 0)
    seconds = view.histograms["e2e_request_latency_seconds"]
    assert seconds.cumulative[-1] == len(answers)
    times = [answer.times for answer in answers if answer.times is not None]
    assert len(times) == len(answers)
    assert min(min(spent.queue_seconds, spent.compute_seconds) for spent in times) >= 0
    assert seconds.sum == pytest.approx(sum(spent.queue_seconds + spent.compute_seconds for spent in times))
    assert view.histograms["request_prompt_tokens"].sum == sum(answer.usage.tokens for answer in answers)


@pytest.mark.slow
def test_killed_ranks_lose_no_request_and_come_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, options=slow) as frontend:
            asked = [request(number, 30) for number in range(40)]
            tasks = [asyncio.create_task(frontend.answer(item, timeout_seconds=TIMEOUT)) for item in asked]
            await asyncio.sleep(0.2)
            os.kill(frontend._supervisor.processes[1], signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
            assert all(map(is_right, asked, answers))
            assert frontend.counters.rerun > 0
            while frontend._supervisor.attempts[1] == 0 or len(frontend._facts) < 2:
                await asyncio.sleep(0.05)
            assert is_right(asked[0], await frontend.answer(asked[0], timeout_seconds=TIMEOUT))

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stopped", "caught in a step"])
def test_a_rank_that_hangs_is_ended_and_its_requests_run_elsewhere(way: str, tmp_path: Path) -> None:
    def options(rank: int, attempt: int) -> tuple[str, ...]:
        hangs = way == "caught in a step" and rank == 1 and attempt == 0
        return (*slow(rank, attempt), *("--hangs",) * hangs)

    async def work() -> None:
        hangs = HangLimits(silent_seconds=2.0, step_seconds=2.0)
        async with serving(tmp_path, options=options, hangs=hangs) as frontend:
            asked = [request(number, 30) for number in range(30)]
            tasks = [asyncio.create_task(frontend.answer(item, timeout_seconds=TIMEOUT)) for item in asked]
            await asyncio.sleep(0.2)
            if way == "stopped":
                os.kill(frontend._supervisor.processes[1], signal.SIGSTOP)
            assert all(map(is_right, asked, await asyncio.gather(*tasks)))
            assert (frontend.counters.ranks_hung, frontend.counters.ranks_lost) == (1, 1)
            while len(frontend._facts) < 2:
                await asyncio.sleep(0.05)
            assert frontend._supervisor.attempts == {0: 0, 1: 1}

    run(work())


@pytest.mark.slow
def test_a_large_step_is_not_a_hang(tmp_path: Path) -> None:
    async def work() -> None:
        options = ("--step-seconds", "3")
        hangs = HangLimits(silent_seconds=2.0, step_seconds=0.5)
        async with serving(tmp_path, ranks=1, options=lambda rank, attempt: options, hangs=hangs) as frontend:
            # The step has 400 tokens; at the rank's rate, `patience` times their duration is longer than 3 seconds.
            asked = request(0, 380)
            assert is_right(asked, await frontend.answer(asked, timeout_seconds=TIMEOUT))
            assert frontend.counters.ranks_hung == 0

    run(work())


@pytest.mark.slow
def test_ranks_that_need_each_other_end_together(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ends_together=True) as frontend:
            os.kill(frontend._supervisor.processes[0], signal.SIGKILL)
            while min(frontend._supervisor.attempts.values()) == 0 or len(frontend._facts) < 2:
                await asyncio.sleep(0.05)
            asked = request(3, 3)
            assert is_right(asked, await frontend.answer(asked, timeout_seconds=TIMEOUT))

    run(work())


@pytest.mark.slow
def test_ranks_that_end_together_stay_one_group_however_often_they_end(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ends_together=True) as frontend:
            asked = [asyncio.create_task(frontend.answer(request(n, 3), timeout_seconds=TIMEOUT)) for n in range(4)]
            for rank in (0, 1):
                while rank not in frontend._supervisor.processes:
                    await asyncio.sleep(0.01)
                before = frontend._supervisor.attempts[rank]
                os.kill(frontend._supervisor.processes[rank], signal.SIGKILL)
                while frontend._supervisor.attempts[rank] == before:
                    await asyncio.sleep(0.01)
                assert len(set(frontend._supervisor.attempts.values())) == 1
            await asyncio.gather(*asked, return_exceptions=True)
            while len(frontend._facts) < 2:
                await asyncio.sleep(0.05)
            assert is_right(request(3, 3), await frontend.answer(request(3, 3), timeout_seconds=TIMEOUT))

    run(work())


@pytest.mark.slow
def test_a_rank_that_is_lost_while_others_start_is_restarted(tmp_path: Path) -> None:
    def options(rank: int, attempt: int) -> tuple[str, ...]:
        if rank == 1:
            return ("--start-seconds", "1.5")
        return ("--dies-after", "0.2") if attempt == 0 else ("--start-seconds", "1")

    async def work() -> None:
        async with serving(tmp_path, options=options) as frontend:
            assert frontend._supervisor.attempts[0] == 1
            assert frontend._router is not None
            assert frontend._router.loads == (0, 0)
            asked = [request(number, 3) for number in range(30)]
            answers = await asyncio.gather(*(frontend.answer(item, timeout_seconds=TIMEOUT) for item in asked))
            assert all(map(is_right, asked, answers))

    run(work())


def test_a_message_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1) as frontend:
            handle_message = frontend._handle_message
            broken = iter([True])

            def once_broken(rank: int, content: bytes) -> None:
                if next(broken, False):
                    raise RuntimeError("a mistake")
                handle_message(rank, content)

            frontend._handle_message = once_broken  # type: ignore[method-assign]
            assert await frontend.answer(request(1), timeout_seconds=TIMEOUT)

    run(work())


@pytest.mark.slow
def test_a_server_that_ends_while_ranks_start_does_not_wait_for_them(tmp_path: Path) -> None:
    run(_closed_while_starting(tmp_path))


async def _closed_while_starting(folder: Path) -> None:
    starting = asyncio.create_task(_never_ready(folder))
    await asyncio.sleep(2)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(starting, 8)  # close() may take 10 seconds, but must not wait here


async def _never_ready(folder: Path) -> None:
    async with serving(folder, options=lambda rank, attempt: ("--start-seconds", "100")):
        pass


def test_a_refusal_of_a_rank_is_an_input_error(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1) as frontend:
            bad = Request("bad", (TokenPiece(-1, np.array([9999], np.int32)),))
            with pytest.raises(InputError, match="beyond the vocabulary"):
                await frontend.answer(bad, timeout_seconds=TIMEOUT)
            assert frontend._router is not None
            assert frontend._router.loads == (0,)

    run(work())


def test_a_failed_step_is_not_an_input_error(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1, options=lambda rank, attempt: ("--error",)) as frontend:
            with pytest.raises(NotServingError, match="RuntimeError"):
                await frontend.answer(request(1), timeout_seconds=TIMEOUT)

    run(work())


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_cancelled(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1, options=slow) as frontend:
            tasks = [asyncio.create_task(frontend.answer(request(n, 30), timeout_seconds=TIMEOUT)) for n in range(20)]
            await asyncio.sleep(0)
            with pytest.raises(AnswerTimeoutError):
                await frontend.answer(request(1, 30), timeout_seconds=0.1)
            cancelled = asyncio.create_task(frontend.answer(request(2, 30), timeout_seconds=TIMEOUT))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            await asyncio.gather(*tasks)
            assert cancelled.cancelled()
            assert frontend.counters.given_up == 2
            assert frontend._router is not None
            assert (frontend._router.loads, frontend._router.requests) == ((0,), {})

    run(work())


@pytest.mark.parametrize(
    ("limits", "name"),
    [(FrontendLimits(waiting_seconds=0.05), "seconds of work"), (FrontendLimits(open_bytes=2000), "bytes")],
)
def test_a_full_queue_refuses_with_a_retry_time(limits: FrontendLimits, name: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1, options=slow, limits=limits) as frontend:
            asked = (asyncio.create_task(frontend.answer(request(n, 30), timeout_seconds=TIMEOUT)) for n in range(20))
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            refused = [error for error in outcomes if isinstance(error, QueueFullError)]
            assert refused
            assert {error.name for error in refused} == {name}
            assert all(error.retry_after_seconds >= 1 for error in refused)
            assert all(isinstance(answer, (Answer, QueueFullError)) for answer in outcomes)
            assert await frontend.answer(request(1), timeout_seconds=TIMEOUT)

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("limits", [FrontendLimits(waiting_seconds=0.05), FrontendLimits(open_bytes=2000)])
def test_an_idle_server_accepts_a_call_of_any_size(limits: FrontendLimits, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1, options=slow, limits=limits) as frontend:
            asked_request = request(0, 400)
            assert is_right(asked_request, await frontend.answer(asked_request, timeout_seconds=TIMEOUT))
            frontend.check_room()
            many = [request(number, 30) for number in range(20)]
            asked = [
                asyncio.create_task(frontend.answer(part_request, timeout_seconds=TIMEOUT, is_admitted=True))
                for part_request in many
            ]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                frontend.check_room()
            with pytest.raises(QueueFullError):
                await frontend.answer(asked_request, timeout_seconds=TIMEOUT)
            assert all(map(is_right, many, await asyncio.gather(*asked)))
            assert frontend.counters.turned_away == 2

    run(work())


def test_a_closing_server_answers_open_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, options=slow) as frontend:
            asked = [request(number, 5) for number in range(30)]
            tasks = [asyncio.create_task(frontend.answer(item, timeout_seconds=TIMEOUT)) for item in asked]
            await asyncio.sleep(0.05)
            closing = asyncio.create_task(frontend.close(20))
            await asyncio.sleep(0)
            with pytest.raises(NotServingError) as refused:
                await frontend.answer(request(1), timeout_seconds=TIMEOUT)
            assert refused.value.value == "draining"
            assert all(map(is_right, asked, await asyncio.gather(*tasks)))
            await closing
            assert not frontend._supervisor.processes

    run(work())


def test_a_rank_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(RankStartError) as failed:
            async with serving(tmp_path, options=lambda rank, attempt: ("--fails",) * rank):
                pass
        assert (failed.value.rank, failed.value.value) == (1, 3)

    run(work())


def test_messages_of_unknown_sockets_are_ignored(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1) as frontend:
            import zmq.asyncio

            stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            stranger.setsockopt(zmq.IDENTITY, b"\xff.7")
            stranger.connect(frontend._endpoint)
            await stranger.send(b"anything")
            assert await frontend.answer(request(1), timeout_seconds=TIMEOUT)
            stranger.close(linger=0)

    run(work())


def test_status_describes_the_model_of_the_ranks(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(tmp_path, ranks=1) as frontend:
            status = frontend.status()
            facts = dataclasses.replace(sum_rank.SumEngine.facts)
            assert (status.state, status.vocabulary_size) == ("ready", facts.vocabulary_size)
            assert status.metrics["compilations_after_ready"] == 0

    run(work())
