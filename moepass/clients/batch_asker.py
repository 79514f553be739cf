"""Requests of a batch that are repeated until a server answers them, and a limit on how many are open."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator

import httpx

from moepass.clients.batch_lines import BatchError, BatchRequest, BatchResponse
from moepass.clients.server_address import body_of, reason_of, retry_after
from moepass.models.errors import MoepassError

# A full queue, a proxy without its server, a server that starts, drains or lost a rank: it may answer later.
FULL_STATUS = 429
TEMPORARY_STATUSES = frozenset({FULL_STATUS, 502, 503})
# Every line would get this answer.
KEY_STATUSES = frozenset({401, 403})
# The answers of another service to an unknown route.
NO_ROUTE_STATUSES = frozenset({404, 405})
_MOST_PAUSE_SECONDS = 60.0


class ServerGoneError(MoepassError, RuntimeError):
    """No request was answered for `expected` seconds."""


class KeyRefusedError(MoepassError, RuntimeError):
    """The server requires another API key."""


class ForeignServerError(MoepassError, RuntimeError):
    """The server has none of the expected routes: it is another service, or it serves pages for people."""


class AdaptiveLimit:
    """A semaphore with `most` units, granted in the order in which they are requested.

    A request for more than `most` units is granted when no other units are in use. If a server refuses requests, the
    limit falls to the number that it accepted. It grows by one unit with each round of answers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()
        self.used = 0

    @property
    def allowed(self) -> int:
        """The current limit."""
        return int(self._allowed)

    @contextlib.asynccontextmanager
    async def acquire(self, count: int = 1) -> AsyncIterator[None]:
        """Use `count` units in the block."""
        grant = asyncio.get_running_loop().create_future()
        self._waiting.append((count, grant))
        self._grant()
        try:
            await grant
            yield
        finally:
            if grant.cancelled():
                self._waiting = collections.deque(waiting for waiting in self._waiting if waiting[1] is not grant)
            else:
                self.used -= count
            self._grant()

    def refused(self) -> None:
        """Lower the limit, because a request was refused."""
        self._allowed = max(1.0, min(self._allowed, self.used - 1.0))

    def answered(self) -> None:
        """Raise the limit, because a request was answered."""
        self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)

    def _grant(self) -> None:
        while self._waiting and (self.used + self._waiting[0][0] <= self.allowed or not self.used):
            count, grant = self._waiting.popleft()
            if not grant.done():
                self.used += count
                grant.set_result(None)


class Asker:
    """A client that repeats a request until it has a final answer, with at most `most_open` at the same time."""

    def __init__(self, client: httpx.AsyncClient, most_open: int, patience_seconds: float) -> None:
        self._client, self._open_requests, self._patience = client, AdaptiveLimit(most_open), patience_seconds
        self._last_answer = -float("inf")
        self._knows_server = False
        self._refusal = ""

    async def answer(self, line: BatchRequest) -> BatchResponse | BatchError:
        """Return the answer to `line`, asking again for as long as the patience lasts.

        After that, a refusal is returned as the answer if the queue was full, or if other requests were answered.
        Otherwise this raises ServerGoneError. Raises KeyRefusedError if the server requires another key, and
        ForeignServerError if the first response does not come from a server with these routes.
        """
        since: float | None = None
        while True:
            async with self._open_requests.acquire():
                outcome, pause = await self._send(line)
                now = time.monotonic()
                if pause is None:
                    self._open_requests.answered()
                    self._last_answer = now
                    return outcome
                self._open_requests.refused()
            since = now if since is None else since
            if now - since >= self._patience:
                is_full = isinstance(outcome, BatchResponse) and outcome.status_code == FULL_STATUS
                if is_full or self._last_answer > since:
                    return outcome
                text = f"no request was answered for {self._patience:g} seconds; the last answer was {self._refusal}"
                raise ServerGoneError(text, expected=self._patience)
            await asyncio.sleep(pause)

    async def _send(self, line: BatchRequest) -> tuple[BatchResponse | BatchError, float | None]:
        """Return the server's answer, and the seconds to wait before asking again, or None if the answer is final."""
        try:
            response = await self._client.post(line.route, content=line.body)
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            seconds = self._client.timeout.read
            return BatchError("timeout", f"the server has not answered within {seconds} seconds"), None
        except httpx.TransportError as error:
            self._refusal = f"no connection ({type(error).__name__}: {error})"
            return BatchError("no_connection", str(error) or type(error).__name__), 1.0
        if response.status_code in KEY_STATUSES:
            text = f"the server refuses the key: {reason_of(response)}; set --api-key to the server's key"
            raise KeyRefusedError(text, name="api_key", expected="the server's key")
        if response.status_code not in TEMPORARY_STATUSES:
            self._check_server(line, response)
            return _parsed(response), None
        self._refusal = reason_of(response)
        return _parsed(response), retry_after(response, _MOST_PAUSE_SECONDS)

    def _check_server(self, line: BatchRequest, response: httpx.Response) -> None:
        """Raise ForeignServerError if the first response does not come from a server with these routes.

        Once the server is known, an unexpected page comes from something in between, such as a proxy.
        """
        if self._knows_server:
            return
        body = body_of(response)
        # The errors of OpenAI's format, and of older versions of vLLM.
        is_error = isinstance(body, dict) and ("error" in body or body.get("object") == "error")
        if body is None or (response.status_code in NO_ROUTE_STATUSES and not is_error):
            raise ForeignServerError(
                f"{self._client.base_url} answers POST {line.route} with {reason_of(response)}, so it lacks the routes "
                "of moepass; set --url to a server that has them",
                name="url",
                value=str(self._client.base_url),
                expected="such as http://127.0.0.1:8000",
            )
        self._knows_server = True


def _parsed(response: httpx.Response) -> BatchResponse | BatchError:
    body = body_of(response) if response.content else ""
    if body is None:
        return BatchError("no_json", reason_of(response))
    request_id: str = response.headers.get("x-request-id", "")
    return BatchResponse(response.status_code, request_id, body)
