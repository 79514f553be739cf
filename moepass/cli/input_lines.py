"""The lines of JSON that `moepass score` reads: within limits, each with its number for errors."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from moepass.models.errors import InputError
from moepass.models.limits import (
    MOST_INPUT_BYTES,
    MOST_LINE_BYTES,
    MOST_LINES,
    TooLargeError,
    check_limit,
    decode_json,
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of input: `number` as an editor counts it, `further` the keys beside `text`."""

    number: int
    text: str
    further: dict[str, Any]


def read_lines(source: str) -> list[Line]:
    """All lines of the file `source`, or of standard input for "-"; blank lines are skipped.

    Raises InputError, which names the line, where one is no JSON object with a string `text`.
    """
    try:
        if source == "-":
            return parse_lines(limited_lines(sys.stdin.buffer, "standard input"), "standard input")
        with open(source, "rb") as opened:
            return parse_lines(limited_lines(opened, source), source)
    except OSError as error:
        raise InputError(
            f"input {source!r} cannot be read: {error.strerror}", name="input", value=source, path=source
        ) from error


def limited_lines(source: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of `source`, of which none is read beyond the limits. Raises TooLargeError; `name` stands in it."""
    number = nbytes = 0
    while raw := source.readline(MOST_LINE_BYTES + 1):
        number += 1
        nbytes += len(raw)
        if len(raw) > MOST_LINE_BYTES:
            raise TooLargeError(
                f"line {number} of {name} is longer than {MOST_LINE_BYTES} bytes, the limit; split it",
                name=f"line {number}",
                value=len(raw),
                expected=MOST_LINE_BYTES,
                path=name,
            )
        check_limit(f"the number of lines of {name}", number, MOST_LINES, "split it into several files")
        check_limit(f"the size of {name} in bytes", nbytes, MOST_INPUT_BYTES, "split it into several files")
        yield raw


def parse_lines(source: Iterable[bytes], name: str) -> list[Line]:
    """As `read_lines`, from the lines themselves; `name` stands in errors."""
    lines: list[Line] = []
    for number, raw in enumerate(source, 1):
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        where = f"line {number}"
        try:
            record = decode_json(raw)
        except InputError as error:
            raise InputError(f"{where} of {name} is no JSON: {error}", name=where, path=name) from error
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
        lines.append(Line(number, text, record))
    if not lines:
        raise InputError(
            f'{name} is empty; it must hold one JSON object per line, such as {{"text": "..."}}', path=name
        )
    return lines


def _kind(value: object) -> str:
    names: dict[type[Any], str] = {
        dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "a number")
