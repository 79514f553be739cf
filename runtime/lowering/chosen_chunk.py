"""The chunk that the run at hand has chosen, for the segments in it that run some tokens at a time."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("chosen", default=None)


@contextlib.contextmanager
def chosen_chunk(tokens: int | None) -> Iterator[None]:
    """Segments that are called inside run at most so many tokens at a time; None: as they were lowered."""
    token = _chosen.set(tokens)
    try:
        yield
    finally:
        _chosen.reset(token)


def chunk_tokens_of_run() -> int | None:
    return _chosen.get()
