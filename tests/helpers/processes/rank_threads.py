"""Ranks played by threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from moepass.runtime.ranks.rendezvous import PeerError

T = TypeVar("T")


def on_rank_threads(ranks: int, function: Callable[[int], T]) -> list[T | PeerError]:
    """Return the result of `function(rank)` on one thread per rank, or the PeerError that it raised."""

    def run(rank: int) -> T | PeerError:
        try:
            return function(rank)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
