"""JSON lines that `moepass score` reads, within the limits on input and with their line numbers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from moepass.models.errors import InputError
from moepass.models.limits import MOST_LINE_BYTES, TooLargeError, decode_json

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class InputLine:
    """A line of input that can be scored.

    Attributes:
        number: the line number, counted from 1.
        text: the text to score.
        extra: the other keys of the line.
    """

    number: int
    text: str
    extra: dict[str, Any]

    @property
    def name(self) -> str:
        """The line's name in error messages."""
        return f"line {self.number}"


@dataclasses.dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be scored, and the error, whose text begins with the line's name."""

    number: int
    error: InputError


def read_lines(source: str) -> Iterator[InputLine | BadLine]:
    """Yield the lines of the file `source`, or of standard input for "-". Blank lines are skipped.

    Lines are read on demand.

    Raises:
        InputError: if the input cannot be read, or has ended without any line.
    """
    try:
        if source == "-":
            yield from parse_lines(limited_lines(sys.stdin.buffer, "standard input"), "standard input")
            return
        with open(source, "rb") as file:
            yield from parse_lines(limited_lines(file, source), source)
    except OSError as error:
        raise InputError(
            f"input {source!r} cannot be read: {error.strerror}", name="input", value=source, path=source
        ) from error


def limited_lines(source: BinaryIO, name: str) -> Iterator[bytes | TooLargeError]:
    """Yield the lines of `source`, and an error instead of each line that is beyond the limit.

    Such a line is never in memory as a whole.

    Args:
        source: the file.
        name: its name in errors.
    """
    number = 0
    while raw := source.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(raw) <= MOST_LINE_BYTES:
            yield raw
            continue
        yield TooLargeError(
            f"line {number} of {name} is longer than {MOST_LINE_BYTES} bytes, the limit; split it",
            name=f"line {number}",
            value=len(raw),
            expected=MOST_LINE_BYTES,
            path=name,
        )
        while raw and not raw.endswith(b"\n"):
            raw = source.readline(MOST_LINE_BYTES)


def parse_lines(source: Iterable[bytes | TooLargeError], name: str) -> Iterator[InputLine | BadLine]:
    """Yield the parsed lines of `source`; see `read_lines`. Errors call the input `name`."""
    is_empty = True
    for number, raw in enumerate(source, 1):
        if isinstance(raw, TooLargeError):
            is_empty = False
            yield BadLine(number, raw)
            continue
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        is_empty = False
        try:
            yield _parsed(number, raw, name)
        except InputError as error:
            yield BadLine(number, error)
    if is_empty:
        raise InputError(
            f'{name} is empty; it must hold one JSON object per line, such as {{"text": "..."}}', path=name
        )


def _parsed(number: int, raw: bytes, name: str) -> InputLine:
    where = f"line {number}"
    try:
        record = decode_json(raw)
    except InputError as error:
        raise InputError(f"{where} of {name} is not valid JSON: {error}", name=where, path=name) from error
    if not isinstance(record, dict):
        raise InputError(
            f'{where} of {name} is {_kind(record)}; it must be an object such as {{"text": "..."}}',
            name=where,
            path=name,
        )
    if "text" not in record:
        keys = ", ".join(repr(key) for key in record) or "none"
        raise InputError(
            f'{where} of {name} has no "text"; its keys are {keys}', name=where, expected="text", path=name
        )
    text = record.pop("text")
    if not isinstance(text, str):
        raise InputError(
            f'{where} of {name}: "text" is {_kind(text)}; it must be a string',
            name=where,
            value=text,
            expected="a string",
            path=name,
        )
    if not text.strip():
        raise InputError(f'{where} of {name}: "text" is empty', name=where, value=text, path=name)
    return InputLine(number, text, record)


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {
        dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "a number")
