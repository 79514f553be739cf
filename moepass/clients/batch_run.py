"""A batch from its first line to its last: many requests are open at once, and answers are written as they arrive.

Pseudo-code
    read the input once and add every line to the index; a custom_id that occurs twice is an error
    read the output and mark the lines that it answers
    N workers: take the next unanswered line, wait until there is memory for it, ask until it is answered, write that
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from moepass.clients.adaptive_limit import AdaptiveLimit
from moepass.clients.batch_index import BatchIndex
from moepass.clients.batch_lines import (
    BadBatchLine,
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    answer_to,
    answer_to_bad_line,
    read_batch,
)
from moepass.clients.batch_output import BatchOutput, StoredAnswer
from moepass.clients.server_address import body_of, reason_of, retry_after
from moepass.models.errors import InputError, MoepassError

# A full queue, a proxy without its server, a server that starts, drains or lost a rank: it may answer later.
FULL_STATUS = 429
TEMPORARY_STATUSES = frozenset({FULL_STATUS, 502, 503})
# Every line would get this answer.
KEY_STATUSES = frozenset({401, 403})
# The answers of another service to an unknown route.
NO_ROUTE_STATUSES = frozenset({404, 405})
_MOST_PAUSE_SECONDS = 60.0
# The most bytes of open requests: half of what a server accepts from all its clients.
_MOST_HELD_BYTES = 256 << 20


class ServerGoneError(MoepassError, RuntimeError):
    """No request was answered for `expected` seconds."""


class KeyRefusedError(MoepassError, RuntimeError):
    """The server requires another API key."""


class ForeignServerError(MoepassError, RuntimeError):
    """The server has none of the expected routes: it is another service, or it serves pages for people."""


@dataclasses.dataclass
class BatchCounts:
    """Numbers of lines.

    Attributes:
        lines: lines of the input.
        answered_before: lines that an earlier run has answered.
        answered: lines that this run has answered.
        errors: answers that are errors.
    """

    lines: int = 0
    answered_before: int = 0
    answered: int = 0
    errors: int = 0

    @property
    def done(self) -> int:
        """The number of lines that are answered."""
        return self.answered_before + self.answered


class Batch:
    """The requests of the file `source`, whose answers are appended to the file `target`.

    Memory holds only the open requests. With `retry_errors`, answers that are errors are removed and asked again.

    Constructing one raises InputError if `source` is not a file or has a custom_id twice, or if `target` contains
    something other than answers to it.
    """

    def __init__(self, source: str, target: str, *, retry_errors: bool = False) -> None:
        self.counts = BatchCounts()
        with contextlib.ExitStack() as opened:
            self._source = opened.enter_context(_open_source(source))
            _check_target(source, target)
            self._index = opened.enter_context(contextlib.closing(BatchIndex()))
            for line in read_batch(self._source):
                self._index.add(line.custom_id, line.number)
                self.counts.lines += 1
            if not self.counts.lines:
                raise InputError(f"input {source!r} is empty; it must hold one request per line", path=source)
            self._output = opened.enter_context(BatchOutput(Path(os.path.realpath(target))))
            self._read_output(source, target, retry_errors)
            self._opened = opened.pop_all()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def is_done(self) -> bool:
        """True if every line is answered."""
        return self.counts.done == self.counts.lines

    async def run(
        self,
        client: httpx.AsyncClient,
        *,
        most_open: int,
        patience_seconds: float,
        on_answer: Callable[[BatchCounts], None] = lambda counts: None,
    ) -> None:
        """Ask all unanswered requests. The output is valid at any time, also if this is cancelled.

        Args:
            client: the client of the server.
            most_open: the largest number of requests that are open at the same time.
            patience_seconds: how long to ask again while no request is answered.
            on_answer: called after each answer with the current counts.

        Raises:
            ServerGoneError: if no request is answered for `patience_seconds`.
            KeyRefusedError: if the server requires another key.
            ForeignServerError: if the first answers are not those of this API.
            InputError: if the output cannot be written.
        """
        asker = _Asker(client, AdaptiveLimit(most_open), patience_seconds)
        self._source.seek(0)
        lines = read_batch(self._source)

        def write(answer: BatchAnswer) -> None:
            self._output.write(answer)
            self.counts.answered += 1
            self.counts.errors += answer.is_error
            on_answer(self.counts)

        reading, held_bytes = asyncio.Lock(), AdaptiveLimit(_MOST_HELD_BYTES)

        async def work() -> None:
            while True:
                async with contextlib.AsyncExitStack() as held:
                    async with reading:  # only one worker holds a line that waits for memory
                        line = await self._next(lines)
                        if line is None:
                            return
                        size = len(line.body) if isinstance(line, BatchRequest) else 0
                        await held.enter_async_context(held_bytes.acquire(size))
                    if isinstance(line, BatchRequest):
                        write(answer_to(line, await asker.answer(line)))
                    else:
                        write(answer_to_bad_line(line))

        workers = [asyncio.create_task(work()) for _ in range(min(most_open, self.counts.lines - self.counts.done))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._output.save()

    async def _next(self, lines: Iterator[BatchRequest | BadBatchLine]) -> BatchRequest | BadBatchLine | None:
        """Return the next unanswered line, or None after the last.

        Lines that were added to the file after the batch began are ignored.
        """
        for line in lines:
            if self._index.is_unanswered(line.custom_id, line.number):
                return line
            await asyncio.sleep(0)  # lets the event loop handle signals
        return None

    def _read_output(self, source: str, target: str, retry_errors: bool) -> None:
        def is_kept(answer: StoredAnswer) -> bool:
            return not (retry_errors and answer.is_error)

        has_dropped = False
        for answer in self._output.read():
            if not is_kept(answer):
                has_dropped = True
            elif self._index.mark_answered(answer.custom_id, answer.number):
                self.counts.errors += answer.is_error
            else:
                shown = answer.id if answer.custom_id is None else f"custom_id {answer.custom_id[:100]!r}"
                raise InputError(
                    f"output {target!r} has an answer to {shown}, but {source!r} has no such line; choose "
                    "another output file",
                    name="output",
                    value=answer.custom_id,
                    path=target,
                )
        if has_dropped:
            self._output.filter(is_kept)
        self.counts.answered_before = self._index.count(answered=True)


class _Asker:
    """A client that repeats a request until it has a final answer."""

    def __init__(self, client: httpx.AsyncClient, open_requests: AdaptiveLimit, patience_seconds: float) -> None:
        self._client, self._open_requests, self._patience = client, open_requests, patience_seconds
        self._last_answer = -float("inf")
        self._knows_server = False
        self._refusal = ""

    async def answer(self, line: BatchRequest) -> BatchResponse | BatchError:
        """Return the answer to `line`, asking again for as long as the patience lasts.

        After that, a refusal is returned as the answer if the queue was full, or if other requests were answered.

        Raises:
            ServerGoneError: if no request was answered in that time.
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
                raise ServerGoneError(
                    f"no request was answered for {self._patience:g} seconds; the last answer was {self._refusal}",
                    expected=self._patience,
                )
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
            raise KeyRefusedError(
                f"the server refuses the key: {reason_of(response)}; set --api-key to the server's key",
                name="api_key",
                expected="the server's key",
            )
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
        if body is None or (response.status_code in NO_ROUTE_STATUSES and not _is_api_error(body)):
            raise ForeignServerError(
                f"{self._client.base_url} answers POST {line.route} with {reason_of(response)}, so it lacks the routes "
                "of moepass; set --url to a server that has them",
                name="url",
                value=str(self._client.base_url),
                expected="such as http://127.0.0.1:8000",
            )
        self._knows_server = True


def _is_api_error(body: Any) -> bool:
    """Return True for an error in the format of OpenAI, or of older versions of vLLM."""
    return isinstance(body, dict) and ("error" in body or body.get("object") == "error")


def _parsed(response: httpx.Response) -> BatchResponse | BatchError:
    body = body_of(response) if response.content else ""
    if body is None:
        return BatchError("no_json", reason_of(response))
    request_id: str = response.headers.get("x-request-id", "")
    return BatchResponse(response.status_code, request_id, body)


def _open_source(source: str) -> BinaryIO:
    try:
        if not Path(source).is_file():
            raise InputError(
                f"input {source!r} is not a file; a pipe cannot be read twice",
                name="input",
                path=source,
            )
        return open(source, "rb")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"input {source!r} cannot be read: {error}", name="input", path=source) from error


def _check_target(source: str, target: str) -> None:
    path = Path(target)
    if path.exists() and not path.is_file():
        raise InputError(
            f"output {target!r} is not a file, so answers cannot be appended to it", name="output", path=target
        )
    if path.exists() and os.path.samefile(source, target):
        raise InputError(f"output {target!r} is also the input; choose another file", name="output", path=target)
