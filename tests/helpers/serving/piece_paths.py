"""The sequences of tokens that the pieces of a request end."""

from __future__ import annotations

from moepass.runtime.serving.requests.request import Request


def piece_path(request: Request, number: int) -> tuple[int, ...]:
    """Return the indices of the pieces from the beginning of the sequence to piece `number`."""
    path = [number]
    while (number := request.pieces[number].parent) >= 0:
        path.append(number)
    return tuple(reversed(path))
