"""The lines of a batch file, in the shapes of OpenAI's Batch API: requests that are read, answers that are written.

    {"custom_id": "a", "method": "POST", "url": "/v1/decisions", "body": {...}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

Whatever is wrong with a line becomes its answer: `response` is null then, and `error` says what. `id` has the number of
the line, by which a line without a custom_id is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import msgspec

from moepass.models.errors import InputError
from moepass.models.limits import MOST_BODY_BYTES, TooLargeError, decode_json

# A body, and what stands around it.
MOST_BATCH_LINE_BYTES = MOST_BODY_BYTES + (1 << 16)
ID_START = "batch_req_"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A path and nothing else: another host's address must not get the key of this one.
_ROUTE = re.compile(r"(/[A-Za-z0-9_-]+)+")
_SHOWN_CHARACTERS = 200


class BatchRequest(msgspec.Struct, frozen=True):
    """A line that can be sent; `body` is JSON as it stands in the file. `number` counts lines as an editor does."""

    number: int
    custom_id: str
    route: str
    body: bytes


class BadBatchLine(msgspec.Struct, frozen=True):
    """A line that cannot be sent, and why. `custom_id` is None where it has none that could be read."""

    number: int
    custom_id: str | None
    problem: str


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server answered; `body` is plain values, or text where it was events."""

    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    """Why there is no response."""

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
        return self.response is None or not 200 <= self.response.status_code < 300


class _Named(msgspec.Struct):
    custom_id: str


class _Line(msgspec.Struct):
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


def read_batch(source: BinaryIO) -> Iterator[BatchRequest | BadBatchLine]:
    """The lines of `source`, one at a time; blank ones are skipped."""
    number = 0
    while raw := source.readline(MOST_BATCH_LINE_BYTES):
        number += 1
        if len(raw) == MOST_BATCH_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := source.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield BadBatchLine(number, None, f"it is longer than {MOST_BATCH_LINE_BYTES} bytes, the limit")
            continue
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if raw.strip():
            yield _parsed(number, raw)


def answer_to(line: BatchRequest | BadBatchLine, found: BatchResponse | BatchError) -> BatchAnswer:
    """The answer to `line`."""
    response, error = (found, None) if isinstance(found, BatchResponse) else (None, found)
    return BatchAnswer(f"{ID_START}{line.number}", line.custom_id, response, error)


def answer_to_bad_line(line: BadBatchLine) -> BatchAnswer:
    return answer_to(line, BatchError("invalid_line", f"line {line.number}: {line.problem}"))


def encode_answer(answer: BatchAnswer) -> bytes:
    """As a line of the output, with its end."""
    return msgspec.json.encode(answer) + b"\n"


def _parsed(number: int, raw: bytes) -> BatchRequest | BadBatchLine:
    custom_id: str | None = None
    try:
        custom_id = decode_json(raw, _Named).custom_id
        line: _Line = decode_json(raw, _Line)
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
        return BadBatchLine(number, custom_id, "body is no JSON object")
    if len(body) > MOST_BODY_BYTES:
        return BadBatchLine(number, custom_id, f"body has {len(body)} bytes; the limit is {MOST_BODY_BYTES}")
    return BatchRequest(number, custom_id, line.url, body)
