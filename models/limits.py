"""Limits on the size of external inputs, so that no input causes unbounded work.

Each limit is far beyond known use and small enough for a machine with 16 GB, so a number beyond it is a mistake or an
attack. An error names the limit, the value, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from moepass.models.errors import InputError, OptionError

# Devices of one plan. The largest published expert-parallel deployments have 320.
MOST_RANKS = 512
# Tokens of one rank and step, over all of its sequences.
MOST_TOKENS = 1 << 24
# Slots of a planned ring, each as large as a layer's experts.
MOST_SLOTS = 256
# Layers, and experts per layer, of a configuration. The largest published models have a few hundred of each.
MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 14
# CPU threads of one process.
MOST_THREADS = 1024

# A machine's figures: bytes and FLOPs per second, bytes of memory, seconds, and slowdowns. Within these limits no sum
# of seconds or bytes overflows.
LEAST_RATE, MOST_RATE = 1e3, 1e21
MOST_SECONDS = 1e12
MOST_SLOWDOWN = 1e3
# Seconds that ranks wait for each other; the operating system supports no longer timeouts.
MOST_WAIT_SECONDS = 1e7

# Limits on the input of `score`, which may have any number of lines. Tokenizing a text takes up to 300 times its bytes.
MOST_LINE_BYTES = 4 << 20
# Requests of `bench`, all of which are in memory.
MOST_BENCH_REQUESTS = 1_000_000
MOST_LABELS = 1024
MOST_BATCH_SIZE = 1 << 16

# The value of an option whose number each run chooses.
AUTO = "auto"

# The values of `experts_compute`: experts multiply in the model's dtype, or in FP8.
MODEL, FP8 = "model", "fp8"

# How experts rest and travel: as the checkpoint or the model stores them, or packed while they are loaded.
ExpertFormat = Literal["stored", "lossless", "elf"]
STORED: Final = "stored"

# Open connections of clients at a server, by default.
MOST_CONNECTIONS = 4096

# Requests to a server: bytes of a body, and of all bodies that are processed at the same time; questions of a request
# and choices of a question, with the limits of OpenAI's API; texts of a request; likely tokens listed per position;
# orders in which a question is asked.
MOST_BODY_BYTES = 32 << 20
MOST_BODIES_BYTES = 512 << 20
MOST_QUESTIONS = 400
MOST_CHOICES = 255
MOST_ITEMS = 4096
MOST_TOP_TOKENS = 20
MOST_ORDERS = 16
# Tokens of a request, where a shared prefix counts once; numbers in one answer, which take up to 30 bytes each.
MOST_REQUEST_TOKENS = 1 << 20
MOST_ANSWER_NUMBERS = 1 << 22
# A text with more characters per token of the model's limit is refused before it is tokenized. Real text has fewer.
MOST_CHARACTERS_PER_TOKEN = 64

# JSON of people or their tools, such as a config.json or a profile; the index of a checkpoint's weights, with a line
# for each of them; the tokenizer's vocabulary. Recursive libraries fail in various ways on JSON that is nested deeper.
MOST_JSON_BYTES = 8 << 20
MOST_INDEX_BYTES = 64 << 20
MOST_TOKENIZER_BYTES = 256 << 20
MOST_JSON_DEPTH = 64


class TooLargeError(InputError):
    """An external input exceeds a limit of `moepass.models.limits`; the limit is `expected`."""


def check_limit(what: str, value: float, most: float, advice: str, *, name: str | None = None) -> None:
    """Raise TooLargeError, with `advice`, if `value` is above `most`.

    `what` begins the message. `name` is the attribute of the error, if `what` is not a name.
    """
    if value > most:
        text = f"{what} is {value}; the limit is {most}: {advice}"
        raise TooLargeError(text, name=name or what, value=value, expected=most)


def read_limited(file: Path, most_bytes: int) -> bytes:
    """Return the bytes of `file`. Raises TooLargeError above `most_bytes`, and OSError as reading does."""
    with file.open("rb") as opened:
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        size = max(file.stat().st_size, len(data))  # a device file reports size 0
        text = f"{file} has {size} bytes or more; the limit is {most_bytes} for files of this kind"
        raise TooLargeError(text, path=file, value=size, expected=most_bytes)
    return data


def check_wait(name: str, seconds: object) -> None:
    """Raise OptionError unless `seconds` is a time that ranks can wait for each other."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:  # type: ignore[operator]
        raise OptionError.wrong(name, seconds, "a number of seconds above 0")
    if seconds > MOST_WAIT_SECONDS:  # type: ignore[operator]
        text = f"{name} is {seconds!r}; the limit is {MOST_WAIT_SECONDS:g} seconds"
        raise OptionError(text, name=name, value=seconds, expected=MOST_WAIT_SECONDS)


def decode_json(data: bytes | str, kind: Any = Any) -> Any:
    """Decode `data` as a value of type `kind`. Raises InputError with only the reason; the caller adds the file."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise InputError(f"it is nested deeper than {MOST_JSON_DEPTH} levels", expected=MOST_JSON_DEPTH) from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise InputError(str(error)) from error
    opening = data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")
    if opening > MOST_JSON_DEPTH:  # rarely true, so most JSON is not walked
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raise InputError beyond the depth limit. Walks level by level, because recursion is what must be avoided."""
    level, depth = [value], 0
    while level := [outer for outer in level if isinstance(outer, (dict, list, tuple))]:
        depth += 1
        if depth > MOST_JSON_DEPTH:
            raise InputError(f"it is nested deeper than {MOST_JSON_DEPTH} levels", expected=MOST_JSON_DEPTH)
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
