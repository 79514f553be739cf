"""The chunk size that the current run chose, for segments that process some tokens at a time."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("chosen", default=None)


@contextlib.contextmanager
def chosen_chunk(tokens: int | None) -> Iterator[None]:
    """Limit the chunks of segments that are called inside to `tokens` tokens; None keeps their own size."""
    token = _chosen.set(tokens)
    try:
        yield
    finally:
        _chosen.reset(token)


def chunk_tokens_of_run() -> int | None:
    """Return the tokens per chunk that the current run chose, if it did."""
    return _chosen.get()
