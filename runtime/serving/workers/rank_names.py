"""Names of the ranks' sockets."""

from __future__ import annotations


def rank_name(rank: int, attempt: int) -> bytes:
    """Return the name of a rank's socket; `attempt` is the number of restarts."""
    return f"{rank}.{attempt}".encode()


def parsed_rank_name(name: bytes) -> tuple[int, int]:
    """Return the rank and the attempt of a socket name, or (-1, -1) if it is not the name of a rank."""
    rank, _, attempt = name.decode(errors="replace").partition(".")
    return (int(rank), int(attempt)) if rank.isdecimal() and attempt.isdecimal() else (-1, -1)
