"""Ranks are asked what they are doing when somebody looks, and only then: a step costs nothing for it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping

from moepass.runtime.serving.requests.view import EngineView

# A rank answers at once unless its process is busy elsewhere; then what it said last is shown.
ANSWER_SECONDS = 0.25
# What is not older than that is not asked for again. To say it takes a rank some milliseconds, so that those who look
# all the time would slow it down.
FRESH_SECONDS = 0.1


class RankStatusPoller:
    """Asks ranks with `send`. All who look at the same time share one question, so that a rank that hangs gets no
    more of them."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._seen: dict[int, EngineView] = {}
        self._times: dict[int, float] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    async def ask(self, ranks: Collection[int]) -> Mapping[int, EngineView]:
        """What each of `ranks` is doing, or was doing when it said so last."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._asked and now - self._times.get(rank, -math.inf) >= FRESH_SECONDS:
                self._asked[rank] = asyncio.get_running_loop().create_future()
                self._send(rank)
        waits = [self._asked[rank] for rank in ranks if rank in self._asked]
        if waits:
            await asyncio.wait(waits, timeout=ANSWER_SECONDS)
        return self._seen

    def heard(self, rank: int, seen: EngineView) -> None:
        self._seen[rank], self._times[rank] = seen, time.monotonic()
        self._over(rank)

    def lost(self, rank: int) -> None:
        """It will not answer, and what it said is of the past."""
        for known in (self._seen, self._times):
            known.pop(rank, None)
        self._over(rank)

    def _over(self, rank: int) -> None:
        asked = self._asked.pop(rank, None)
        if asked is not None:
            asked.set_result(None)
