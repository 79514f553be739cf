"""Environment variables that libraries read at each call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set the variable in a block, for all threads."""
    old_value = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if old_value is not None:
            os.environ[name] = old_value
