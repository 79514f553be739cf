"""Counters of a server, and histograms of requests and steps with the names and bounds of vLLM."""

from __future__ import annotations

import dataclasses

from moepass.runtime.serving.engine.step_engine import StepResult
from moepass.runtime.serving.requests.answer import Answer, AnswerTimes
from moepass.runtime.serving.requests.view import Histogram

# vLLM's bounds, which start at 0.3 seconds, and smaller ones for fast decisions. All bounds of vLLM are included, so
# that histograms of both servers can be added.
_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(mantissa * 10**power for power in range(7) for mantissa in (1, 2, 5))


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


class RequestTimes:
    """Histograms of all answered requests and of all steps, by name, in seconds or tokens."""

    def __init__(self) -> None:
        self.histograms = {
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_inference_time_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_REQUEST_TOKENS),
            "iteration_tokens_total": Histogram(_STEP_TOKENS),
        }

    def answered(self, answer: Answer, arrived: float, started: float, now: float) -> Answer:
        """Record a request that is answered at time `now`, and return its answer with the times added."""
        times = AnswerTimes(started - arrived, now - started)
        self.histograms["e2e_request_latency_seconds"].observe(now - arrived)
        self.histograms["request_queue_time_seconds"].observe(times.queue_seconds)
        self.histograms["request_inference_time_seconds"].observe(times.compute_seconds)
        self.histograms["request_prompt_tokens"].observe(answer.usage.tokens)
        return dataclasses.replace(answer, times=times)

    def stepped(self, tokens: int) -> None:
        """Record a step that computed this many tokens."""
        self.histograms["iteration_tokens_total"].observe(tokens)
