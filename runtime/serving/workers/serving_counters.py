"""Counters of a server."""

from __future__ import annotations

import dataclasses

from moepass.runtime.serving.engine.step_engine import StepResult


@dataclasses.dataclass
class ServingCounters:
    """Sums since the start, over all ranks. `http/metrics_text.py` explains each of them."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    turned_away: int = 0
    failed: int = 0
    given_up: int = 0
    rerun: int = 0
    ranks_lost: int = 0
    ranks_hung: int = 0
    steps: int = 0
    split_steps: int = 0
    tokens: int = 0
    request_tokens: int = 0
    cached_tokens: int = 0
    flops: int = 0
    unshared_flops: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def add_step(self, result: StepResult) -> None:
        """Add the result of one step."""
        self.steps += 1
        self.split_steps += result.retries
        self.tokens += result.tokens
        self.flops += result.flops
        self.unshared_flops += result.unshared_flops
        self.step_seconds += result.seconds
        self.exposed_seconds += result.exposed_seconds
