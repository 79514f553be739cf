"""Views of the ranks for the status page and the metrics, from the router and the ranks' own reports."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping

from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.view import EngineView, RankState, RankView
from moepass.runtime.serving.router.assignments import Assignment
from moepass.runtime.serving.router.router import RankRouter

_NO_VIEW = EngineView()


def rank_views(
    ranks: int,
    router: RankRouter | None,
    facts: Mapping[int, EngineFacts],
    attempts: Mapping[int, int],
    assigned: Iterable[Assignment],
    engine_views: Mapping[int, EngineView],
) -> tuple[RankView, ...]:
    """Return the view of each of `ranks` ranks.

    Args:
        ranks: The number of ranks.
        router: Knows the loads; None before all ranks are ready.
        facts: Engine facts of the ranks that are ready. Other ranks are starting or lost.
        attempts: How often each rank was restarted.
        assigned: All open assignments.
        engine_views: The last report of each rank.
    """
    open_requests = collections.Counter(assignment.rank for assignment in assigned)
    views = []
    for rank in range(ranks):
        engine = facts.get(rank)
        state: RankState = "ready" if engine is not None else "lost" if attempts.get(rank) else "starting"
        most = router.saturation_flops if router is not None else math.inf
        views.append(
            RankView(
                rank,
                state,
                router.loads[rank] if router is not None else 0,
                engine.saturation_flops if engine is not None else 0,
                most if math.isfinite(most) else None,
                open_requests[rank],
                engine.flops_per_second if engine is not None else 0.0,
                engine.form if engine is not None else None,
                engine.notes.get("steps", engine.form) if engine is not None else "",
                engine_views.get(rank, _NO_VIEW),
            )
        )
    return tuple(views)
