"""The lines of a batch file in the format of OpenAI's Batch API: requests that are read, answers that are written.

    {"custom_id": "a", "method": "POST", "url": "/v1/decisions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

The answer to an invalid line has null as `response`, and the problem as `error`. `id` contains the line number, which
identifies a line without a custom_id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import msgspec

from moepass.models.errors import InputError
from moepass.models.limits import MOST_BODY_BYTES, TooLargeError, decode_json

# A body and the fields around it.
MOST_BATCH_LINE_BYTES = MOST_BODY_BYTES + (1 << 16)
ID_START = "batch_req_"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A path without a host, because another host must not get the key of this server.
_ROUTE = re.compile(r"(/[A-Za-z0-9_-]+)+")
_SHOWN_CHARACTERS = 200


class BatchRequest(msgspec.Struct, frozen=True):
    """A line that can be sent.

    Attributes:
        number: the line number, counted from 1.
        route: the path to send it to.
        body: the JSON text of the file.
    """

    number: int
    custom_id: str
    route: str
    body: bytes


class BadBatchLine(msgspec.Struct, frozen=True):
    """A line that cannot be sent, and the problem. `custom_id` is None if it could not be read."""

    number: int
    custom_id: str | None
    problem: str


class BatchResponse(msgspec.Struct, frozen=True):
    """The server's answer. `body` is JSON, or text if the server sent events."""

    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    """The reason for a missing response."""

    code: Literal["invalid_line", "timeout", "no_connection", "no_json"]
    message: str


class BatchAnswer(msgspec.Struct, frozen=True):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def is_error(self) -> bool:
        """True unless the response has a status of success."""
        return self.response is None or not 200 <= self.response.status_code < 300


class _CustomId(msgspec.Struct):
    custom_id: str


class _RequestFields(msgspec.Struct):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


def read_batch(source: BinaryIO) -> Iterator[BatchRequest | BadBatchLine]:
    """Yield the lines of `source`, one at a time. Blank lines are skipped."""
    number = 0
    while raw := source.readline(MOST_BATCH_LINE_BYTES):
        number += 1
        if len(raw) == MOST_BATCH_LINE_BYTES and not raw.endswith(b"\n"):
            while (more := source.readline(1 << 20)) and not more.endswith(b"\n"):
                pass  # skips the remainder of the line
            yield BadBatchLine(number, None, f"it is longer than {MOST_BATCH_LINE_BYTES} bytes, the limit")
            continue
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if raw.strip():
            yield _parsed(number, raw)


def answer_to(line: BatchRequest | BadBatchLine, outcome: BatchResponse | BatchError) -> BatchAnswer:
    """Return the output line for `line`."""
    response, error = (outcome, None) if isinstance(outcome, BatchResponse) else (None, outcome)
    return BatchAnswer(f"{ID_START}{line.number}", line.custom_id, response, error)


def answer_to_bad_line(line: BadBatchLine) -> BatchAnswer:
    """Return the output line for a line that cannot be sent."""
    return answer_to(line, BatchError("invalid_line", f"line {line.number}: {line.problem}"))


def encode_answer(answer: BatchAnswer) -> bytes:
    """Return `answer` as a line of the output, with the line break."""
    return msgspec.json.encode(answer) + b"\n"


def _parsed(number: int, raw: bytes) -> BatchRequest | BadBatchLine:
    custom_id: str | None = None
    try:
        custom_id = decode_json(raw, _CustomId).custom_id
        line: _RequestFields = decode_json(raw, _RequestFields)
    except TooLargeError as error:
        return BadBatchLine(number, custom_id, str(error))
    except InputError as error:
        return BadBatchLine(number, custom_id, f"{error}; it must have custom_id, method (POST), url and body")
    if not _ROUTE.fullmatch(line.url):
        shown = line.url[:_SHOWN_CHARACTERS]
        return BadBatchLine(
            number, custom_id, f"url is {shown!r}; it must be the path of a route, such as /v1/decisions"
        )
    body = bytes(line.body)
    if not body.startswith(b"{"):
        return BadBatchLine(number, custom_id, "body is not a JSON object")
    if len(body) > MOST_BODY_BYTES:
        return BadBatchLine(number, custom_id, f"body has {len(body)} bytes; the limit is {MOST_BODY_BYTES}")
    return BatchRequest(number, custom_id, line.url, body)
