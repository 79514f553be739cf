"""Polling of the ranks' status, only on demand, so that it costs nothing during steps."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping

from moepass.runtime.serving.requests.view import EngineView

# A poll waits this long for the ranks. A rank that does not report in time is shown with its last report.
ANSWER_SECONDS = 0.25
# A report that is not older than this is used again. A report takes a rank some milliseconds, so frequent polls would
# slow it down.
FRESH_SECONDS = 0.1


class RankStatusPoller:
    """Polls the status of ranks, and caches their reports.

    Concurrent polls share one request to each rank, so that a rank that hangs does not accumulate requests.

    Args:
        send: Sends a status request to a rank.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._views: dict[int, EngineView] = {}
        self._times: dict[int, float] = {}
        self._pending: dict[int, asyncio.Future[None]] = {}

    async def poll(self, ranks: Collection[int]) -> Mapping[int, EngineView]:
        """Return the last report of each rank, after waiting up to ANSWER_SECONDS for new reports of `ranks`."""
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._pending and now - self._times.get(rank, -math.inf) >= FRESH_SECONDS:
                self._pending[rank] = asyncio.get_running_loop().create_future()
                self._send(rank)
        waits = [self._pending[rank] for rank in ranks if rank in self._pending]
        if waits:
            await asyncio.wait(waits, timeout=ANSWER_SECONDS)
        return self._views

    def report(self, rank: int, view: EngineView) -> None:
        """Store the report of `rank`, and wake the polls that wait for it."""
        self._views[rank], self._times[rank] = view, time.monotonic()
        self._finish(rank)

    def lost(self, rank: int) -> None:
        """Forget the reports of a lost rank, and wake the polls that wait for it."""
        self._views.pop(rank, None)
        self._times.pop(rank, None)
        self._finish(rank)

    def _finish(self, rank: int) -> None:
        pending = self._pending.pop(rank, None)
        if pending is not None:
            pending.set_result(None)
