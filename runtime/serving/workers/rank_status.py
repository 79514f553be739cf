"""The status of the ranks for the status page and the metrics. It is polled only on demand, so steps are not slower."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.view import EngineView, RankState, RankView
from moepass.runtime.serving.router.routable import Assignment
from moepass.runtime.serving.router.router import RankRouter

# A poll waits this long for the ranks. A rank that does not report in time is shown with its last report.
ANSWER_SECONDS = 0.25
# A report that is not older than this is used again. A report takes a rank some milliseconds, so frequent polls would
# slow it down.
FRESH_SECONDS = 0.1


class RankStatusPoller:
    """Polls the status of ranks with `send`. Concurrent polls share one request, so that none pile up at a rank."""

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


def rank_views(
    ranks: int,
    router: RankRouter | None,
    facts: Mapping[int, EngineFacts],
    attempts: Mapping[int, int],
    assigned: Iterable[Assignment],
    engine_views: Mapping[int, EngineView],
) -> tuple[RankView, ...]:
    """Return the view of each of `ranks` ranks. Those without `facts` are starting, or lost if restarted before."""
    open_requests = collections.Counter(assignment.rank for assignment in assigned)
    loads = router.loads if router is not None else (0,) * ranks
    most = router.saturation_flops if router is not None and math.isfinite(router.saturation_flops) else None
    views = []
    for rank in range(ranks):
        engine = facts.get(rank)
        state: RankState = "ready" if engine is not None else "lost" if attempts.get(rank) else "starting"
        views.append(
            RankView(
                rank,
                state,
                loads[rank],
                engine.saturation_flops if engine is not None else 0,
                most,
                open_requests[rank],
                engine.flops_per_second if engine is not None else 0.0,
                engine.form if engine is not None else None,
                engine.notes.get("steps", engine.form) if engine is not None else "",
                engine_views.get(rank, EngineView()),
                engine.memory.parts if engine is not None else {},
                engine.memory_limit_bytes if engine is not None else 0.0,
            )
        )
    return tuple(views)
