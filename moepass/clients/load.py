"""Requests that are sent to a server, and the time of each answer.

A closed loop keeps a number of requests open; an open loop sends requests at scheduled times.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
import msgspec

from moepass.clients.server_address import body_of, reason_of
from moepass.clients.workloads import BenchRequest

_ONE_LINE = 200


@dataclasses.dataclass(frozen=True)
class RequestOutcome:
    """The outcome of a request. Times are seconds since the start.

    Attributes:
        due: when the request should have been sent.
        sent: when it was sent.
        done: when the response was complete.
        status: the HTTP status, 0 without a response.
        problem: why the response is not an answer; empty for an answer.
        input_tokens: the input tokens that `usage` reports, or None.
        cached_tokens: the cached tokens among these, or None.
    """

    due: float
    sent: float
    done: float
    status: int
    problem: str = ""
    input_tokens: int | None = None
    cached_tokens: int | None = None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ReportedUsage(msgspec.Struct):
    input_tokens: int | None = None
    prompt_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens_details: _TokenDetails | None = None
    prompt_tokens_details: _TokenDetails | None = None

    @property
    def input(self) -> int | None:
        return next((count for count in (self.input_tokens, self.prompt_tokens, self.total_tokens) if count), None)

    @property
    def cached(self) -> int | None:
        details = self.input_tokens_details or self.prompt_tokens_details
        return details.cached_tokens if details else None


class _ReplyUsage(msgspec.Struct):
    usage: _ReportedUsage | None = None


class _AnsweredQuestion(msgspec.Struct):
    type: str = ""
    reason: str = ""


class _AnsweredQuestions(msgspec.Struct):
    answers: list[_AnsweredQuestion] = []


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

    await _all([work() for _ in range(min(concurrency, len(requests)))])
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

    await _all([work(request, due) for request, due in zip(requests, arrivals, strict=True)])
    return outcomes


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    if body_of(response) is None:
        return RequestOutcome(due, sent, done, 200, reason_of(response)[:_ONE_LINE])
    usage = _decoded(response.content, _ReplyUsage).usage or _ReportedUsage()
    problem = _refusal(response.content) if request.route.endswith("/decisions") else ""
    return RequestOutcome(due, sent, done, 200, problem, usage.input, usage.cached)


def _refusal(content: bytes) -> str:
    """Return the reason of the first refused question, or an empty text. Refused questions were not computed."""
    for answer in _decoded(content, _AnsweredQuestions).answers:
        if answer.type == "refusal":
            return f"refusal: {answer.reason}"[:_ONE_LINE]
    return ""


def _decoded(content: bytes, kind: type[msgspec.Struct]):  # type: ignore[no-untyped-def]  # returns a `kind`
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return kind()
