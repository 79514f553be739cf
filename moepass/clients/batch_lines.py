"""The files of a batch in the format of OpenAI's Batch API: requests that are read, answers that are appended.

    {"custom_id": "a", "method": "POST", "url": "/v1/decisions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

The answer to an invalid line has null as `response`, and the problem as `error`. `id` contains the line number, which
identifies a line without a custom_id.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from moepass.models.errors import InputError
from moepass.models.limits import MOST_BODY_BYTES, TooLargeError, decode_json

# A body and the fields around it.
MOST_BATCH_LINE_BYTES = MOST_BODY_BYTES + (1 << 16)
ID_START = "batch_req_"
# A path without a host, because another host must not get the key of this server.
_ROUTE = re.compile(r"(/[A-Za-z0-9_-]+)+")
_SHOWN_CHARACTERS = 200
_ID = re.compile(rf"{ID_START}[0-9]{{1,18}}")
_FIRST_BYTES = b'{"id":"' + ID_START.encode()
# The most bytes of a line that an earlier run wrote. Embeddings of the largest accepted request have 130 MB.
_MOST_ANSWER_BYTES = 256 << 20


class BatchRequest(msgspec.Struct, frozen=True):
    """A line that can be sent: its number, counted from 1, and its body as JSON text."""

    number: int
    custom_id: str
    route: str
    body: bytes


class BadBatchLine(msgspec.Struct, frozen=True):
    """A line that cannot be sent, and the problem. `custom_id` is None if it could not be read."""

    number: int
    custom_id: str | None
    problem: str


class StoredResponse(msgspec.Struct, frozen=True):
    """The part of a response that says whether it is an error."""

    status_code: int


class StoredAnswer(msgspec.Struct, frozen=True):
    """The fields of an answer in the output that identify its line and say whether it is an error."""

    id: str
    custom_id: str | None
    response: StoredResponse | None

    @property
    def number(self) -> int:
        """The number of the line in the input."""
        return int(self.id.removeprefix(ID_START))

    @property
    def is_error(self) -> bool:
        """True unless the response has a status of success."""
        return self.response is None or not 200 <= self.response.status_code < 300


class BatchResponse(StoredResponse, frozen=True):
    """The server's answer. `body` is JSON, or text if the server sent events."""

    request_id: str
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    """The reason for a missing response."""

    code: Literal["invalid_line", "timeout", "no_connection", "no_json"]
    message: str


class BatchAnswer(StoredAnswer, frozen=True):
    """A line of the output."""

    response: BatchResponse | None
    error: BatchError | None


class _CustomId(msgspec.Struct):
    custom_id: str


class _RequestFields(msgspec.Struct):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


def limited_lines(source: BinaryIO, most_bytes: int) -> Iterator[bytes | None]:
    """Yield the lines of `source` without its byte order mark; None replaces a line with more than `most_bytes`."""
    mark = b"\xef\xbb\xbf"
    while raw := source.readline(most_bytes + 1):
        yield raw.removeprefix(mark) if len(raw) <= most_bytes else None
        if len(raw) > most_bytes:
            while raw and not raw.endswith(b"\n"):
                raw = source.readline(most_bytes)
        mark = b""


def read_batch(source: BinaryIO) -> Iterator[BatchRequest | BadBatchLine]:
    """Yield the lines of `source`, one at a time. Blank lines are skipped."""
    for number, raw in enumerate(limited_lines(source, MOST_BATCH_LINE_BYTES), 1):
        if raw is None:
            yield BadBatchLine(number, None, f"it is longer than {MOST_BATCH_LINE_BYTES} bytes, the limit")
        elif raw.strip():
            yield _parsed(number, raw)


def answer_to(line: BatchRequest | BadBatchLine, outcome: BatchResponse | BatchError) -> BatchAnswer:
    """Return the output line for `line`."""
    response, error = (outcome, None) if isinstance(outcome, BatchResponse) else (None, outcome)
    return BatchAnswer(f"{ID_START}{line.number}", line.custom_id, response, error)


def _parsed(number: int, raw: bytes) -> BatchRequest | BadBatchLine:
    custom_id: str | None = None
    try:
        custom_id = decode_json(raw, _CustomId).custom_id
        line: _RequestFields = decode_json(raw, _RequestFields)
    except TooLargeError as error:
        return BadBatchLine(number, custom_id, str(error))
    except InputError as error:
        return BadBatchLine(number, custom_id, f"{error}; it must have custom_id, method (POST), url and body")
    body = bytes(line.body)
    if not _ROUTE.fullmatch(line.url):
        shown = line.url[:_SHOWN_CHARACTERS]
        problem = f"url is {shown!r}; it must be the path of a route, such as /v1/decisions"
    elif not body.startswith(b"{"):
        problem = "body is not a JSON object"
    elif len(body) > MOST_BODY_BYTES:
        problem = f"body has {len(body)} bytes; the limit is {MOST_BODY_BYTES}"
    else:
        return BatchRequest(number, custom_id, line.url, body)
    return BadBatchLine(number, custom_id, problem)


class BatchOutput:
    """The output file at `path`, locked so that two batches cannot write to it at the same time.

    Each answer is appended by one write. If the process is killed during a write, the last line is incomplete, and
    `read` removes it.

    Methods raise InputError if the file cannot be written, contains something other than answers, or is deleted,
    replaced or changed by another program. Otherwise a batch could report success although its answers are lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._opened(os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._bytes = os.fstat(self._file).st_size

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self._file)

    def read(self) -> Iterator[StoredAnswer]:
        """Yield the answers of earlier runs, and remove an incomplete last line."""
        with os.fdopen(os.dup(self._file), "rb") as source:
            source.seek(0)
            number = end = 0
            while raw := source.readline(_MOST_ANSWER_BYTES):
                number += 1
                if not raw.endswith(b"\n"):
                    if not raw.startswith(_FIRST_BYTES[: len(raw)]):
                        raise self._foreign(number)
                    os.ftruncate(self._file, end)
                    self._bytes = end
                    return
                end += len(raw)
                yield self._stored(raw, number)

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer."""
        self._check_unchanged()
        remaining = memoryview(msgspec.json.encode(answer) + b"\n")
        try:
            while remaining:
                written = os.write(self._file, remaining)
                self._bytes += written
                remaining = remaining[written:]
        except OSError as error:
            raise self._failure("written", error) from error

    def drop_errors(self) -> None:
        """Remove the answers that are errors. The file is replaced in one step."""
        folder = self.path.parent
        try:
            number, name = tempfile.mkstemp(dir=folder, prefix=".moepass-", suffix=".part")
        except OSError as error:
            raise self._failure("written", error) from error
        try:
            with os.fdopen(number, "wb") as target, self.path.open("rb") as source:
                for raw in source:
                    if not self._stored(raw, 0).is_error:
                        target.write(raw)
                target.flush()
                os.fsync(target.fileno())
            os.chmod(name, self.path.stat().st_mode & 0o777)
            new = self._opened(os.O_RDWR | os.O_APPEND, Path(name))
            os.replace(name, self.path)
        except OSError as error:
            Path(name).unlink(missing_ok=True)
            raise self._failure("written", error) from error
        os.close(self._file)
        self._file = new
        self._bytes = os.fstat(new).st_size

    def save(self) -> None:
        """Wait until the answers are on the disk."""
        os.fsync(self._file)
        self._check_unchanged()

    def _opened(self, flags: int, path: Path | None = None) -> int:
        try:
            opened = os.open(path or self.path, flags, 0o666)
        except OSError as error:
            raise self._failure("written", error) from error
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise self._failure("locked", error) from error
            raise self._error("is being written by another batch; wait for it, or choose another file") from error
        return opened

    def _stored(self, raw: bytes, number: int) -> StoredAnswer:
        try:
            answer: StoredAnswer = decode_json(raw, StoredAnswer)
        except InputError as error:
            raise self._foreign(number) from error
        if not _ID.fullmatch(answer.id):
            raise self._foreign(number)
        return answer

    def _check_unchanged(self) -> None:
        opened = os.fstat(self._file)
        try:
            named = os.stat(self.path)
        except OSError:
            named = None
        if named is None or not os.path.samestat(opened, named):
            what = "has been deleted or replaced"
        elif opened.st_size != self._bytes:
            what = f"has {opened.st_size} bytes although {self._bytes} were written, so another program changed it"
        else:
            return
        raise self._error(
            f"{what} while answers were appended to it; keep other programs away from it, and run the same command "
            "again"
        )

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"line {number} of the output {str(self.path)!r} is not an answer of moepass batch; choose another file, "
            "nothing was written to this one",
            name="output",
            path=self.path,
        )

    def _failure(self, what: str, error: OSError) -> InputError:
        return self._error(f"cannot be {what}: {error.strerror}")

    def _error(self, text: str) -> InputError:
        return InputError(f"output {str(self.path)!r} {text}", name="output", path=self.path)
