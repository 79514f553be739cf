"""Parsing of byte counts in user options."""

from __future__ import annotations

import math
import re

from moepass.models.errors import InputError


def parse_bytes(text: str | None, name: str = "memory_budget") -> float | None:
    """Return `60e9`, `60GB` or `56GiB` as bytes; None for None.

    Raises InputError for any other text. The error calls the option `name`.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*(?:([kMGT])(i?)B|B)?", text.strip())
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not 0 < number < math.inf:
        message = f"{name.replace('_', ' ')} {text!r} is not a number of bytes above 0, such as 60e9, 60GB or 56GiB"
        raise InputError(message, name=name, value=text)
    power = " kMGT".index(match[2]) if match[2] else 0
    scale: int = (1024 if match[3] else 1000) ** power
    return number * scale
