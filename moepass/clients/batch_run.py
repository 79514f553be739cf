"""A batch from its first line to its last: many requests open at once, answers written as they come.

Pseudo-code
    read the input once: every line gets a place in the index; a custom_id that comes twice is an error
    read the output: what has an answer there is not asked again
    N workers: take the next line, wait until its bytes have a place, ask until there is an answer, write it
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
from moepass.clients.places import Places
from moepass.clients.server_address import body_of, reason_of, retry_after
from moepass.models.errors import InputError, MoepassError

# A full queue, a proxy whose server is away, a server that starts or drains or has lost a rank: later it may answer.
FULL_STATUS = 429
TEMPORARY_STATUSES = frozenset({FULL_STATUS, 502, 503})
# Every line would be answered with it.
KEY_STATUSES = frozenset({401, 403})
# What another service says to a route that it does not have.
NO_ROUTE_STATUSES = frozenset({404, 405})
_MOST_PAUSE_SECONDS = 60.0
# Bytes of the lines that are being asked; half of what a server takes of all its clients.
_MOST_HELD_BYTES = 256 << 20


class ServerGoneError(MoepassError, RuntimeError):
    """No request was answered for `expected` seconds."""


class KeyRefusedError(MoepassError, RuntimeError):
    """The server asks for another API key."""


class ForeignServerError(MoepassError, RuntimeError):
    """What answers has none of these routes: it is another service, or a page for people."""


@dataclasses.dataclass
class BatchCounts:
    """Lines of the input; those answered by an earlier run, and by this one; how many answers are errors."""

    lines: int = 0
    answered_before: int = 0
    answered: int = 0
    errors: int = 0

    @property
    def done(self) -> int:
        return self.answered_before + self.answered


class Batch:
    """The file `source`, whose answers go to `target`, of which nothing is held in memory but the open requests.

    Raises InputError where a file cannot be used: `source` is none or has a custom_id twice, `target` holds other
    things than answers to it.
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
        return self.counts.done == self.counts.lines

    async def run(
        self,
        client: httpx.AsyncClient,
        *,
        most_open: int,
        patience_seconds: float,
        on_answer: Callable[[BatchCounts], None] = lambda counts: None,
    ) -> None:
        """Ask for all that is left. When this is cancelled, the output is as good as ever.

        Raises ServerGoneError where nothing is answered for `patience_seconds`, KeyRefusedError where the server asks
        for another key, ForeignServerError where the first answers are none of an API, and InputError where the output
        cannot be written.
        """
        asker = _Asker(client, Places(most_open), patience_seconds)
        self._source.seek(0)
        lines = read_batch(self._source)

        def write(answer: BatchAnswer) -> None:
            self._output.write(answer)
            self.counts.answered += 1
            self.counts.errors += answer.is_error
            on_answer(self.counts)

        turn, held_bytes = asyncio.Lock(), Places(_MOST_HELD_BYTES)

        async def work() -> None:
            while True:
                async with contextlib.AsyncExitStack() as held:
                    async with turn:  # no more than one holds a line that has no place yet
                        line = await self._next(lines)
                        if line is None:
                            return
                        size = len(line.body) if isinstance(line, BatchRequest) else 0
                        await held.enter_async_context(held_bytes.take(size))
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
        """The next line without an answer; None where there is none. What was added to the file meanwhile is left."""
        for line in lines:
            if self._index.is_left(line.custom_id, line.number):
                return line
            await asyncio.sleep(0)  # a signal must be heard meanwhile
        return None

    def _read_output(self, source: str, target: str, retry_errors: bool) -> None:
        def is_kept(answer: StoredAnswer) -> bool:
            return not (retry_errors and answer.is_error)

        dropped = False
        for answer in self._output.read():
            if not is_kept(answer):
                dropped = True
            elif self._index.mark_answered(answer.custom_id, answer.number):
                self.counts.errors += answer.is_error
            else:
                shown = answer.id if answer.custom_id is None else f"custom_id {answer.custom_id[:100]!r}"
                raise InputError(
                    f"output {target!r} has an answer to {shown}, which {source!r} does not have; give another output",
                    name="output",
                    value=answer.custom_id,
                    path=target,
                )
        if dropped:
            self._output.keep(is_kept)
        self.counts.answered_before = self._index.count(answered=True)


class _Asker:
    """Asks a server until it answers."""

    def __init__(self, client: httpx.AsyncClient, places: Places, patience_seconds: float) -> None:
        self._client, self._places, self._patience = client, places, patience_seconds
        self._last_answer = -float("inf")
        self._knows_server = False
        self._refusal = ""

    async def answer(self, line: BatchRequest) -> BatchResponse | BatchError:
        """The answer to `line`. That of a full queue is one after as long as patience lasts, and so is any other
        refusal that not all get.
        """
        since: float | None = None
        while True:
            async with self._places.take():
                found, pause = await self._asked(line)
                now = time.monotonic()
                if pause is None:
                    self._places.answered()
                    self._last_answer = now
                    return found
                self._places.refused()
            since = now if since is None else since
            if now - since >= self._patience:
                is_full = isinstance(found, BatchResponse) and found.status_code == FULL_STATUS
                if is_full or self._last_answer > since:
                    return found
                raise ServerGoneError(
                    f"no request was answered for {self._patience:g} seconds; the last one got {self._refusal}",
                    expected=self._patience,
                )
            await asyncio.sleep(pause)

    async def _asked(self, line: BatchRequest) -> tuple[BatchResponse | BatchError, float | None]:
        """An answer, and seconds after which to ask again, None where it is final."""
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
                f"the server refuses the key: {reason_of(response)}; give the right --api-key",
                name="api_key",
                expected="the server's key",
            )
        if response.status_code not in TEMPORARY_STATUSES:
            self._check_known(line, response)
            return _parsed(response), None
        self._refusal = reason_of(response)
        return _parsed(response), retry_after(response, _MOST_PAUSE_SECONDS)

    def _check_known(self, line: BatchRequest, response: httpx.Response) -> None:
        """Raises ForeignServerError where nothing shows that this is a server of these routes. Once it has answered,
        a page that comes instead of an answer is one of something between it and us.
        """
        if self._knows_server:
            return
        body = body_of(response)
        if body is None or (response.status_code in NO_ROUTE_STATUSES and not _tells_error(body)):
            raise ForeignServerError(
                f"{self._client.base_url} answers POST {line.route} with {reason_of(response)}: it is no server with "
                "the routes of moepass; give the address of one as --url",
                name="url",
                value=str(self._client.base_url),
                expected="such as http://127.0.0.1:8000",
            )
        self._knows_server = True


def _tells_error(body: Any) -> bool:
    """Whether it is an error in the shape of OpenAI's, or of vLLM's older versions."""
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
                f"input {source!r} is no file; it is read twice, and again when a batch goes on",
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
        raise InputError(f"output {target!r} is no file; answers are added to it", name="output", path=target)
    if path.exists() and os.path.samefile(source, target):
        raise InputError(f"output {target!r} is the input; give another file", name="output", path=target)
