"""Check that a user can read a refusal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moepass.passes.ir.plan import Refusal

# Names of a graph's inputs and sizes, and Python internals.
UNREADABLE = re.compile(r"\barg\d+_\d+\b|\b[su]\d+\b|KeyError|_tensor_constant|<built-in|\[SymInt")


def check_readable(refusals: Sequence[Refusal]) -> None:
    """Check that each refusal names a module, a source line and a reason, without names from inside the compiler."""
    for refusal in refusals:
        assert refusal.where
        assert refusal.source_line, refusal
        assert not UNREADABLE.search(refusal.reason), refusal
