"""Arguments of the command line that need parsing."""

from __future__ import annotations

from moepass.models.errors import InputError, OptionError
from moepass.models.limits import MOST_THREADS, check_limit, decode_json


def parse_labels(text: str | None) -> list[str] | None:
    """Return `a,b` or `["a", "b"]` as a list, and None for None.

    Raises:
        InputError: if `text` begins with a bracket and is not a JSON list of strings.
    """
    if text is None:
        return None
    if not text.startswith("["):
        return text.split(",")
    try:
        labels: list[str] = decode_json(text, list[str])
        return labels
    except InputError as error:
        raise InputError(
            f"labels {text!r} are not a JSON list of strings: {error}", name="labels", value=text
        ) from error


def parse_range(name: str, text: str) -> tuple[int, int]:
    """Return `5` as (5, 5) and `5-9` as (5, 9).

    Raises:
        OptionError: for any other text, with `name` as the name of the option.
    """
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError as error:
        raise OptionError.wrong(name, text, "a number such as 64, or a range such as 50-500") from error


def set_threads(threads: int | None) -> None:
    """Let torch compute with `threads` CPU threads; None keeps its default.

    Raises:
        TooLargeError: if there are more than `MOST_THREADS`.
    """
    if threads is not None:
        check_limit("threads", threads, MOST_THREADS, "more threads than cores make nothing faster")
        import torch

        torch.set_num_threads(threads)
