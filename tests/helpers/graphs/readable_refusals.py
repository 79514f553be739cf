"""What every refusal must be, whatever it refuses: for several test files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moepass.passes.ir.plan import Refusal

# Names of a graph's inputs and sizes, and what Python says to itself.
UNREADABLE = re.compile(r"\barg\d+_\d+\b|\b[su]\d+\b|KeyError|_tensor_constant|<built-in|\[SymInt")


def check_readable(refusals: Sequence[Refusal]) -> None:
    """Each says where in the model it is, on which line, and why, in words of the model."""
    for refusal in refusals:
        assert refusal.where
        assert refusal.source_line, refusal
        assert not UNREADABLE.search(refusal.reason), refusal
