"""How large what comes from outside may be: one place for all limits, so that no input makes unbounded work.

Each is far beyond what is known to be in use and small enough for a machine of 16 GB, so that beyond it a number is a
mistake, or somebody's attack. An error names the limit, the value, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from moepass.models.errors import InputError, OptionError

# Devices of one plan. The largest expert-parallel deployments that are published have 320.
MOST_RANKS = 512
# Tokens of one rank and step, over all of its sequences.
MOST_TOKENS = 1 << 24
# Slots of a planned ring, each as large as a layer's experts.
MOST_SLOTS = 256
# Layers and experts per layer, as a configuration says. The deepest published models have some hundred layers, and
# those with the most experts some hundred in a layer.
MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 14
# CPU threads, of one process.
MOST_THREADS = 1024

# A machine's figures: bytes and FLOPs per second, bytes of memory, and what may take how long, or how much longer. In
# between, no sum of seconds or bytes overflows.
LEAST_RATE, MOST_RATE = 1e3, 1e21
MOST_SECONDS = 1e12
MOST_SLOWDOWN = 1e3
# How long ranks wait for each other: what the operating system can wait for, and a person.
MOST_WAIT_SECONDS = 1e7

# Limits on the input of `score`, which may have any number of lines. A text takes up to 300 times its bytes while it
# becomes tokens.
MOST_LINE_BYTES = 4 << 20
# Requests that `bench` makes, which are all in memory.
MOST_BENCH_REQUESTS = 1_000_000
MOST_LABELS = 1024
MOST_BATCH_SIZE = 1 << 16

# What stands for a number that each run chooses.
AUTO = "auto"

# Connections that clients have open at a server that is told no other number.
MOST_CONNECTIONS = 4096

# What clients send to a server: bytes of a body, and of all that are answered at the same time; questions of a request
# and choices of a question, which are the limits of OpenAI's API; texts of a request; likely tokens that are listed at
# a place; orders in which a question is asked.
MOST_BODY_BYTES = 32 << 20
MOST_BODIES_BYTES = 512 << 20
MOST_QUESTIONS = 400
MOST_CHOICES = 255
MOST_ITEMS = 4096
MOST_TOP_TOKENS = 20
MOST_ORDERS = 16
# Tokens of a request, a shared prefix counted once; numbers of one answer, which take up to 30 bytes each.
MOST_REQUEST_TOKENS = 1 << 20
MOST_ANSWER_NUMBERS = 1 << 22
# A text of more characters for each token that the model takes is refused unread. No text in use has so long words.
MOST_CHARACTERS_PER_TOKEN = 64

# JSON that people or their tools write, such as a config.json or a profile; the index of a checkpoint's weights, which
# has a line for each of them; the tokenizer's vocabulary. Of anything nested deeper than that, libraries that walk
# through it recursively fail in ways of their own.
MOST_JSON_BYTES = 8 << 20
MOST_INDEX_BYTES = 64 << 20
MOST_TOKENIZER_BYTES = 256 << 20
MOST_JSON_DEPTH = 64


class TooLargeError(InputError):
    """Something from outside is beyond a limit of `moepass.models.limits`, which is `expected`."""


def check_limit(what: str, value: float, most: float, advice: str, *, name: str | None = None) -> None:
    """Raise TooLargeError, which gives `advice`, where `value` is beyond `most`. `name`: where `what` is a sentence."""
    if value > most:
        text = f"{what} is {value}; the limit is {most}: {advice}"
        raise TooLargeError(text, name=name or what, value=value, expected=most)


def read_limited(file: Path, most_bytes: int) -> bytes:
    """The bytes of `file`. Raises TooLargeError where there are more than `most_bytes`, OSError as reading does."""
    with file.open("rb") as opened:
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        size = max(file.stat().st_size, len(data))  # a device says 0, and has no end
        raise TooLargeError(
            f"{file} has {size} bytes or more; the limit is {most_bytes} for a file of its kind",
            path=file,
            value=size,
            expected=most_bytes,
        )
    return data


def check_wait(name: str, seconds: object) -> None:
    """Raise OptionError where `seconds` is no time that ranks could wait for each other."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:  # type: ignore[operator]
        raise OptionError.wrong(name, seconds, "a number of seconds above 0")
    if seconds > MOST_WAIT_SECONDS:  # type: ignore[operator]
        raise OptionError(
            f"{name} is {seconds!r}; the limit is {MOST_WAIT_SECONDS:g} seconds",
            name=name,
            value=seconds,
            expected=MOST_WAIT_SECONDS,
        )


def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """`data` as a value of `kind`. Raises InputError with the reason alone: the caller knows what `data` is of."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise InputError(f"it is nested deeper than {MOST_JSON_DEPTH} levels", expected=MOST_JSON_DEPTH) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InputError(str(error)) from error
    opening = data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")
    if opening > MOST_JSON_DEPTH:  # which most JSON has not
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Level by level: recursion is what must not be needed."""
    level, depth = [value], 0
    while level := [outer for outer in level if isinstance(outer, (dict, list, tuple))]:
        depth += 1
        if depth > MOST_JSON_DEPTH:
            raise InputError(f"it is nested deeper than {MOST_JSON_DEPTH} levels", expected=MOST_JSON_DEPTH)
        level = [part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer)]
