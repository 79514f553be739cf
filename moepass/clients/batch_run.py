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
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import httpx

from moepass.clients.batch_asker import AdaptiveLimit, Asker
from moepass.clients.batch_lines import BadBatchLine, BatchError, BatchOutput, BatchRequest, answer_to, read_batch
from moepass.clients.server_address import run_all
from moepass.models.errors import InputError, OptionError

# The most bytes of open requests: half of what a server accepts from all its clients.
_MOST_HELD_BYTES = 256 << 20
_CACHE_KILOBYTES = 16 << 10


@dataclasses.dataclass
class BatchCounts:
    """Numbers of lines: of the input, answered by an earlier run, answered by this run, and answered with errors."""

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

    Constructing one raises OptionError if `source` is not a file, or if `target` is not a file or is the same one, and
    InputError if `source` has a custom_id twice, or if `target` contains something other than answers to it.
    """

    def __init__(self, source: str, target: str, *, retry_errors: bool = False) -> None:
        self.counts = BatchCounts()
        with contextlib.ExitStack() as opened:
            self._source = opened.enter_context(_open_source(source))
            _check_target(source, target)
            self._index = opened.enter_context(contextlib.closing(_Index()))
            for line in read_batch(self._source):
                self._index.add(line.custom_id, line.number)
                self.counts.lines += 1
            if not self.counts.lines:
                raise InputError(f"input {source!r} is empty; it must contain one request per line", path=source)
            self._output = opened.enter_context(contextlib.closing(BatchOutput(Path(os.path.realpath(target)))))
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

        A request that is refused for now is sent again for up to `patience_seconds`; see `Asker.answer`. `on_answer` is
        called after each answer with the current counts. Raises InputError if the output cannot be written, and the
        errors of `Asker.answer`.
        """
        asker = Asker(client, most_open, patience_seconds)
        self._source.seek(0)
        lines = read_batch(self._source)
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
                        answer = answer_to(line, await asker.answer(line))
                    else:
                        answer = answer_to(line, BatchError("invalid_line", f"line {line.number}: {line.problem}"))
                    self._output.write(answer)
                    self.counts.answered += 1
                    self.counts.errors += answer.is_error
                    on_answer(self.counts)

        try:
            await run_all([work() for _ in range(min(most_open, self.counts.lines - self.counts.done))])
        finally:
            self._output.save()

    async def _next(self, lines: Iterator[BatchRequest | BadBatchLine]) -> BatchRequest | BadBatchLine | None:
        """Return the next unanswered line, or None. Lines that were added after the batch began are ignored."""
        for line in lines:
            if self._index.is_unanswered(line.custom_id, line.number):
                return line
            await asyncio.sleep(0)  # lets the event loop handle signals
        return None

    def _read_output(self, source: str, target: str, retry_errors: bool) -> None:
        has_dropped = False
        for answer in self._output.read():
            if retry_errors and answer.is_error:
                has_dropped = True
            elif self._index.mark_answered(answer.custom_id, answer.number):
                self.counts.errors += answer.is_error
            else:
                shown = answer.id if answer.custom_id is None else f"custom_id {answer.custom_id[:100]!r}"
                text = (
                    f"output {target!r} has an answer to {shown}, but {source!r} has no such line; choose "
                    "another output file"
                )
                raise InputError(text, name="output", value=answer.custom_id, path=target)
        if has_dropped:
            self._output.drop_errors()
        self.counts.answered_before = self._index.count_answered()


class _Index:
    """The lines of a batch and which of them are answered, on disk because memory would grow with the file.

    A line without a custom_id is identified by its number. The database has no name on disk and ends with the process.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            f"PRAGMA cache_size = -{_CACHE_KILOBYTES}; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE lines (key BLOB PRIMARY KEY, number INTEGER, answered INTEGER) WITHOUT ROWID; BEGIN"
        )

    def close(self) -> None:
        """Delete the database."""
        self._database.close()

    def add(self, custom_id: str | None, number: int) -> None:
        """Add a line. Raise InputError with both line numbers if an earlier line has the same custom_id."""
        try:
            self._database.execute("INSERT INTO lines VALUES (?, ?, 0)", (_key(custom_id, number), number))
        except sqlite3.IntegrityError:
            row = self._database.execute("SELECT number FROM lines WHERE key = ?", (_key(custom_id, number),))
            (first,) = row.fetchone()
            text = repr(custom_id)
            shown = text if len(text) <= 100 else text[:100] + "…"
            message = f"lines {first} and {number} have the same custom_id, {shown}; it must be unique"
            raise InputError(message, name="custom_id", value=custom_id, expected="each once") from None

    def mark_answered(self, custom_id: str | None, number: int) -> bool:
        """Mark a line as answered, and return False if the file has no such line."""
        updated = self._database.execute("UPDATE lines SET answered = 1 WHERE key = ?", (_key(custom_id, number),))
        return updated.rowcount == 1

    def is_unanswered(self, custom_id: str | None, number: int) -> bool:
        """Return True if line `number` has this custom_id, and no earlier run has answered the line."""
        row = self._database.execute(
            "SELECT 1 FROM lines WHERE key = ? AND number = ? AND answered = 0", (_key(custom_id, number), number)
        )
        return row.fetchone() is not None

    def count_answered(self) -> int:
        """Return the number of lines that are answered."""
        (count,) = self._database.execute("SELECT count(*) FROM lines WHERE answered = 1").fetchone()
        return int(count)


def _key(custom_id: str | None, number: int) -> bytes:
    return b"line %d" % number if custom_id is None else b"id " + custom_id.encode()


def _open_source(source: str) -> BinaryIO:
    try:
        if Path(source).is_file():
            return open(source, "rb")
    except (OSError, ValueError) as error:
        raise OptionError(f"input {source!r} cannot be read: {error}", name="input", path=source) from error
    text = f"input {source!r} is not a file; a pipe cannot be read twice"
    raise OptionError(text, name="input", path=source)


def _check_target(source: str, target: str) -> None:
    if not os.path.exists(target):
        return
    if not os.path.isfile(target):
        text = f"output {target!r} is not a file, so answers cannot be appended to it"
        raise OptionError(text, name="output", path=target)
    if os.path.samefile(source, target):
        raise OptionError(f"output {target!r} is also the input; choose another file", name="output", path=target)
