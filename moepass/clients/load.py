"""Requests in a closed loop, which keeps a number of them open, or an open loop, which sends them at set times."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from moepass.clients.server_address import body_of, reason_of, run_all
from moepass.clients.workloads import BenchRequest

_ONE_LINE = 200


@dataclasses.dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request: its status, 0 without a response, and `problem`, which is empty for an answer.

    The times when it was due, sent and answered are seconds since the start. `usage` may report tokens.
    """

    due: float
    sent: float
    done: float
    status: int
    problem: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None


async def closed_loop(
    client: httpx.AsyncClient,
    requests: Sequence[BenchRequest],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[RequestOutcome]:
    """Send the requests, `concurrency` at a time, each when an earlier one has been answered."""
    start, remaining = time.perf_counter(), iter(requests)
    outcomes: list[RequestOutcome] = []

    async def work() -> None:
        for request in remaining:
            outcomes.append(await _send(client, request, start, time.perf_counter() - start))
            on_done()

    await run_all([work() for _ in range(min(concurrency, len(requests)))])
    return outcomes


async def open_loop(
    client: httpx.AsyncClient,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    on_done: Callable[[], None] = lambda: None,
) -> list[RequestOutcome]:
    """Send each request at its arrival time in seconds, however many are open."""
    start = time.perf_counter()
    outcomes: list[RequestOutcome] = []

    async def work(request: BenchRequest, due: float) -> None:
        await asyncio.sleep(start + due - time.perf_counter())
        outcomes.append(await _send(client, request, start, due))
        on_done()

    await run_all([work(request, due) for request, due in zip(requests, arrivals, strict=True)])
    return outcomes


async def _send(client: httpx.AsyncClient, request: BenchRequest, start: float, due: float) -> RequestOutcome:
    sent = time.perf_counter() - start
    try:
        response = await client.post(request.route, content=request.body)
    except httpx.HTTPError as error:
        problem = f"{type(error).__name__}: {error}"[:_ONE_LINE]
        return RequestOutcome(due, sent, time.perf_counter() - start, 0, problem)
    done = time.perf_counter() - start
    if response.status_code != 200:
        return RequestOutcome(due, sent, done, response.status_code, reason_of(response)[:_ONE_LINE])
    body = body_of(response)
    if body is None:
        return RequestOutcome(due, sent, done, 200, reason_of(response)[:_ONE_LINE])
    problem = _refusal(body) if request.route.endswith("/decisions") else ""
    return RequestOutcome(due, sent, done, 200, problem, *_usage(body))


def _usage(body: Any) -> tuple[int | None, int | None]:
    """Return the input tokens and the cached tokens that a server reports, in any of the usual formats."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return None, None
    counts = [usage.get(name) for name in ("input_tokens", "prompt_tokens", "total_tokens")]
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return next((n for n in counts if isinstance(n, int) and n), None), cached if isinstance(cached, int) else None


def _refusal(body: Any) -> str:
    """Return the reason of the first refused question, or an empty text. Refused questions were not computed."""
    answers = body.get("answers") if isinstance(body, dict) else None
    for answer in answers if isinstance(answers, list) else ():
        if isinstance(answer, dict) and answer.get("type") == "refusal":
            return f"refusal: {answer.get('reason', '')}"[:_ONE_LINE]
    return ""
