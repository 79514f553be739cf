"""What the sockets of ranks are called."""

from __future__ import annotations


def rank_name(rank: int, attempt: int) -> bytes:
    """The name of a rank's socket."""
    return f"{rank}.{attempt}".encode()


def parsed_rank_name(name: bytes) -> tuple[int, int]:
    """Rank and attempt; (-1, -1) for what is no such name."""
    rank, _, attempt = name.decode(errors="replace").partition(".")
    return (int(rank), int(attempt)) if rank.isdecimal() and attempt.isdecimal() else (-1, -1)
