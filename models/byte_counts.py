"""Numbers of bytes as people write them."""

from __future__ import annotations

import math
import re

from moepass.models.errors import InputError


def parse_bytes(text: str | None, name: str = "memory_budget") -> float | None:
    """`60e9`, `60GB` or `56GiB` as bytes; None for None. Raises InputError for anything else, which it calls `name`."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*(?:([kMGT])(i?)B|B)?", text.strip())
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number < math.inf:
        raise InputError(
            f"{name.replace('_', ' ')} {text!r} is no number of bytes above 0, such as 60e9, 60GB or 56GiB",
            name=name,
            value=text,
        )
    power = " kMGT".index(found[2]) if found[2] else 0
    scale: int = (1024 if found[3] else 1000) ** power
    return number * scale
