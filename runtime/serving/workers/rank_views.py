"""Ranks as those see them who look: what the router knows of them, and what they say themselves."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping

from moepass.runtime.serving.engine.step_engine import EngineFacts
from moepass.runtime.serving.requests.view import EngineView, RankState, RankView
from moepass.runtime.serving.router.decisions import Assignment
from moepass.runtime.serving.router.router import RankRouter

_NOTHING_SEEN = EngineView()


def rank_views(
    ranks: int,
    router: RankRouter | None,
    facts: Mapping[int, EngineFacts],
    attempts: Mapping[int, int],
    assigned: Iterable[Assignment],
    seen: Mapping[int, EngineView],
) -> tuple[RankView, ...]:
    """One for each of `ranks`. Those without `facts` are not ready, or not any more."""
    open_requests = collections.Counter(assignment.rank for assignment in assigned)
    found = []
    for rank in range(ranks):
        known = facts.get(rank)
        state: RankState = "ready" if known is not None else "lost" if attempts.get(rank) else "starting"
        most = router.saturation_flops if router is not None else math.inf
        found.append(
            RankView(
                rank,
                state,
                router.loads[rank] if router is not None else 0,
                known.saturation_flops if known is not None else 0,
                most if math.isfinite(most) else None,
                open_requests[rank],
                known.flops_per_second if known is not None else 0.0,
                known.form if known is not None else None,
                known.notes.get("steps", known.form) if known is not None else "",
                seen.get(rank, _NOTHING_SEEN),
            )
        )
    return tuple(found)
