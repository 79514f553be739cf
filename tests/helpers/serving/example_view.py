"""A view of two ranks, one of them lost, with a step of two nodes."""

from __future__ import annotations

from moepass.runtime.serving.requests.view import BackendView, EngineView, RankView, StepNode, StepView

STEP = StepView(4, 0.5, 2, 9, 16, 800, 1600, 0.25, (StepNode(-1, 16, True, 0), StepNode(0, 9, False, 2)), 1)
VIEW = BackendView(
    (
        RankView(
            *(0, "ready", 30, 50, 120.0, 3, 1e6, "trie", "tries: …", EngineView(STEP, 8, 6, 2, 64)),
            memory_bytes={"weights": 3e9, "slots": 0.0, "step": 2e9, "cache": 1e9},
            memory_limit_bytes=8e9,
        ),
        RankView(1, "lost", 0, 0, None, 0, 0.0, None, "", EngineView()),
    ),
    waiting=2,
    running=1,
)
