"""The router and ranks of `moepass serve` without HTTP: requests are sent together, answers are timed one by one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
import numpy as np
import psutil

from benchmarks.serving.peer_process import Run
from benchmarks.serving.serving_workloads import Prompts, ServedModel
from moepass.cli.serve_options import RankOptions, RankSetup
from moepass.models.checkpoint.checkpoint_folders import load_config
from moepass.models.homes import home_named
from moepass.models.sizes.families import from_config
from moepass.runtime.serving.batching.step_flops import FlopsTable
from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.request import NO_TOKENS, Request, TokenPiece, TokenRead
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.workers.frontend import Frontend
from moepass.runtime.serving.workers.frontend_limits import FrontendLimits
from moepass.runtime.serving.workers.supervisor import RankCommand

MakeRouter = Callable[[int, FlopsFormula, list[EngineFacts]], RankRouter]
_TIMEOUT_SECONDS = 600.0


class ServedRanks:
    """A router and its ranks. Unless `shares`, no two requests share a token, in a step or in the cache."""

    def __init__(
        self, model: ServedModel, make_router: MakeRouter, *, ranks: int, threads: int, home: str, shares: bool = True
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moepass-")
        self._shares, self._runs = shares, 0
        self._endpoint = f"ipc://{self._folder.name}/ranks"
        key = bytes(32)
        setup = RankSetup(
            "demo" if model.name == "demo" else str(model.folder),
            RankOptions(ranks=ranks, home=home, threads=threads, kv_cache=None if shares else "off"),
            key.hex(),
            self._folder.name,
        )

        def command(rank: int, attempt: int, endpoint: str) -> RankCommand:
            words = (sys.executable, "-m", "moepass.cli.serve_rank", endpoint, str(rank), str(attempt))
            return RankCommand((*words, str(os.getpid())), msgspec.json.encode(setup))

        self._loop = asyncio.new_event_loop()
        self._frontend = self._loop.run_until_complete(
            self._started(model, make_router, ranks, command, key, home_named(home).is_spread)
        )

    async def _started(
        self,
        model: ServedModel,
        make_router: MakeRouter,
        ranks: int,
        command: Callable[[int, int, str], RankCommand],
        key: bytes,
        ends_together: bool,
    ) -> Frontend:
        frontend = Frontend(
            ranks,
            command,
            endpoint=self._endpoint,
            formula=FlopsTable(from_config(load_config(model.folder))),
            make_router=make_router,
            key=key,
            limits=FrontendLimits(),
            ends_together=ends_together,
        )
        await frontend.start()
        return frontend

    def ask(self, prompts: Prompts) -> Run:
        """Send all prompts at once. Every run is a separate tenant, so it does not find the cache of earlier runs."""
        self._runs += 1
        requests = [self._request(number, prompt) for number, prompt in enumerate(prompts)]
        before, counters = self._processor_seconds(), dataclasses.replace(self._frontend.counters)
        run = self._loop.run_until_complete(self._answers(requests))
        used, counted = self._processor_seconds() - before, self._frontend.counters
        computed, alone = counted.flops - counters.flops, counted.unshared_flops - counters.unshared_flops
        return dataclasses.replace(run, processor_seconds=used, flops_saved=1 - computed / alone)

    def _processor_seconds(self) -> float:
        """Return the processor seconds of the ranks and of this process, which runs the router."""
        usage = os.times()
        ranks = [child.cpu_times() for child in psutil.Process().children() if self._endpoint in child.cmdline()]
        return usage.user + usage.system + sum(rank.user + rank.system for rank in ranks)

    def _request(self, number: int, prompt: list[int]) -> Request:
        read = TokenRead(len(prompt) - 1, NO_TOKENS, top=1)
        salt = f"{self._runs}" if self._shares else f"{self._runs}.{number}"
        return Request(str(number), (TokenPiece(-1, np.array(prompt, np.int32), (read,)),), salt.encode())

    async def _answers(self, requests: list[Request]) -> Run:
        started = time.perf_counter()

        async def timed(request: Request) -> tuple[Answer, float]:
            answer = await self._frontend.answer(request, timeout_seconds=_TIMEOUT_SECONDS)
            return answer, time.perf_counter() - started

        results = await asyncio.gather(*(timed(request) for request in requests))
        seconds = time.perf_counter() - started
        reads = [answer.pieces[0].reads[0] for answer, _ in results]
        return Run(
            seconds,
            [int(read.top_tokens[0]) for read in reads],
            [float(read.top_log_probabilities[0]) for read in reads],
            [latency for _, latency in results],
        )

    def compilations_after_ready(self) -> int:
        """Return the number of compilations after the ranks were ready."""
        return int(self._frontend.status().metrics["compilations_after_ready"])

    def __enter__(self) -> ServedRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run_until_complete(self._frontend.close(1.0))
        self._loop.close()
        self._folder.cleanup()
