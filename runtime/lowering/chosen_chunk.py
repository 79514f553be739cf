"""The chunk size that the current run chose, for segments that run in chunks of tokens."""

from __future__ import annotations

import contextvars

_chosen: contextvars.ContextVar[int | None] = contextvars.ContextVar("chosen", default=None)


class ChosenChunk:
    """A context that limits chunks of the segments called inside to `tokens` tokens; None keeps their own size."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens

    def __enter__(self) -> None:
        self._reset = _chosen.set(self._tokens)

    def __exit__(self, *_: object) -> None:
        _chosen.reset(self._reset)


def chunk_tokens_of_run() -> int | None:
    """Return the tokens per chunk that the current run chose, if it did."""
    return _chosen.get()
