"""A frontend whose ranks are `sum_rank` processes, and requests for them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np

from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.answer import Answer
from moepass.runtime.serving.requests.backend import FrontendLimits
from moepass.runtime.serving.requests.request import Request, TokenPiece, TokenRead
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import FlopsFormula
from moepass.runtime.serving.router.router import RankRouter
from moepass.runtime.serving.workers.frontend import HANGS, Frontend
from moepass.runtime.serving.workers.rank_watch import HangLimits
from moepass.runtime.serving.workers.supervisor import RankProcess, start_process
from tests.helpers.serving import sum_rank

KEY = bytes(range(32))
TIMEOUT = 30.0
NO_LIMITS = FrontendLimits()


class TokensFormula:
    """A cost of one FLOP per token."""

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        return new_tokens


def make_router(ranks: int, formula: FlopsFormula, facts: list[EngineFacts]) -> RankRouter:
    """Return a prefix router whose ranks take two full steps each."""
    saturation = 2 * facts[0].saturation_flops
    return PrefixRouter(ranks, formula, saturation_flops=saturation, flops_per_second=facts[0].flops_per_second)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    ranks: int = 2,
    options: Callable[[int, int], tuple[str, ...]] = lambda rank, attempt: (),
    limits: FrontendLimits = NO_LIMITS,
    ends_together: bool = False,
    hangs: HangLimits = HANGS,
) -> AsyncIterator[Frontend]:
    """Start a frontend with its ranks; `options(rank, attempt)` are command-line options of `sum_rank`."""

    endpoint = f"ipc://{folder}/ranks"

    def start_rank(rank: int, attempt: int) -> Awaitable[RankProcess]:
        arguments = (endpoint, str(rank), str(attempt), *options(rank, attempt))
        return start_process((sys.executable, sum_rank.__file__, *arguments), b"options")

    frontend = Frontend(
        ranks,
        start_rank,
        endpoint=endpoint,
        formula=TokensFormula(),
        make_router=make_router,
        key=KEY,
        limits=limits,
        ends_together=ends_together,
        hangs=hangs,
    )
    try:
        await frontend.start()
        yield frontend
    finally:
        await frontend.close(10)


def run(work: Awaitable[None]) -> None:
    """Run a coroutine for at most a minute."""
    asyncio.run(asyncio.wait_for(work, 60))  # type: ignore[arg-type]


def request(number: int, questions: int = 0) -> Request:
    """Return a request with a prompt and `questions` questions behind it; its tokens depend on `number`."""
    prompt = np.arange(1, 20 + number % 7, dtype=np.int32)
    read = (TokenRead(0, np.array([1], np.int32)),)
    parts = tuple(TokenPiece(0, np.array([number % 500 + part], np.int32), read) for part in range(questions))
    return Request("the client's name", (TokenPiece(-1, prompt, read), *parts))


def is_right(asked: Request, answer: Answer) -> bool:
    """Return True if each read is answered with the sum of the tokens of its sequence."""
    expected: list[float] = []
    for piece in asked.pieces:
        expected.append((expected[piece.parent] if piece.parent >= 0 else 0) + float(piece.tokens.sum()))
    sums = [piece.reads[0].log_probabilities[0] for piece in answer.pieces]
    return answer.id == asked.id and sums == expected


def slow(rank: int, attempt: int) -> tuple[str, ...]:
    """Return the options of ranks whose steps take 0.05 seconds."""
    return ("--step-seconds", "0.05")
