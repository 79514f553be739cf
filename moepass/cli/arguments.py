"""Arguments of the command line that are more than a number or a word."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from moepass.models.errors import InputError
from moepass.models.limits import (
    MOST_THREADS,
    check_limit,
    decode_json,
)

if TYPE_CHECKING:
    pass


def parse_labels(text: str | None) -> list[str] | None:
    """`a,b` or `["a", "b"]` as a list; None for None. Raises InputError for a list that is not one of strings."""
    if text is None:
        return None
    if not text.startswith("["):
        return text.split(",")
    try:
        labels: list[str] = decode_json(text, list[str])
        return labels
    except InputError as error:
        raise InputError(f"labels {text!r} are no JSON list of strings: {error}") from error


def parse_bytes(text: str | None) -> float | None:
    """`60e9`, `60GB` or `56GiB` as bytes; None for None. Raises InputError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*(?:([kMGT])(i?)B|B)?", text.strip())
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number < math.inf:
        raise InputError(f"memory budget {text!r} is no number of bytes above 0, such as 60e9, 60GB or 56GiB")
    power = " kMGT".index(found[2]) if found[2] else 0
    scale: int = (1024 if found[3] else 1000) ** power
    return number * scale


def set_threads(threads: int | None) -> None:
    if threads is not None:
        check_limit("threads", threads, MOST_THREADS, "more than there are cores make nothing faster")
        import torch

        torch.set_num_threads(threads)
