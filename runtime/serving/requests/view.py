"""Records for the status page: the ranks, the last step of each, and histograms of durations.

They hold no token and no text, because those belong to clients.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

RankState = Literal["starting", "ready", "lost"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepNode:
    """A run of tokens without a branch in the trie of a step.

    Attributes:
        parent: index of the node before it, -1 for a root.
        tokens: number of tokens.
        is_cached: the tokens were read from the cache, not computed.
        reads: number of tokens whose output is read.
    """

    parent: int
    tokens: int
    is_cached: bool
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepView:
    """A finished step.

    Attributes:
        number: counts the steps since the rank became ready.
        age_seconds: time since the step ended.
        requests: number of requests in the step.
        tokens: computed tokens.
        cached_tokens: tokens read from the cache, each counted once.
        flops: computed FLOPs.
        unshared_flops: FLOPs if each request ran alone and without a cache.
        seconds: duration of the step.
        nodes: the trie, level by level, so that parents come first; limited to a few hundred nodes.
        left_out: number of nodes beyond that limit.
    """

    number: int
    age_seconds: float
    requests: int
    tokens: int
    cached_tokens: int
    flops: int
    unshared_flops: int
    seconds: float
    nodes: tuple[StepNode, ...]
    left_out: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineView:
    """The last step of an engine and the occupancy of its cache.

    Attributes:
        step: None before the first step.
        cache_blocks: blocks of the cache.
        cached_blocks: blocks with content.
        used_blocks: blocks that the running step uses.
        block_bytes: size of a block.
    """

    step: StepView | None = None
    cache_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    block_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """A rank as the router and the rank itself see it.

    Attributes:
        load_flops: FLOPs of all assigned work without an answer.
        saturation_flops: FLOPs of a full step, which hides the transfers of experts.
        most_load_flops: the rank takes no more work at this load or above; None for no limit.
        open_requests: requests, or parts of requests, that are assigned and unanswered.
        flops_per_second: FLOPs per second of a full step.
        form: whether a step is a trie or padded rows; None if unknown.
        form_text: a sentence with the form and the reason.
    """

    rank: int
    state: RankState
    load_flops: int
    saturation_flops: int
    most_load_flops: float | None
    open_requests: int
    flops_per_second: float
    form: Literal["trie", "rows"] | None
    form_text: str
    engine: EngineView


class Histogram:
    """Counts of observed values up to each of the ascending `bounds`, and their sum, as in Prometheus."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Add `value`."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> tuple[int, ...]:
        """The number of values up to each bound; the last entry counts all values."""
        return tuple(itertools.accumulate(self._counts))


@dataclasses.dataclass(frozen=True, slots=True)
class BackendView:
    """All ranks, the numbers of waiting and running requests, and histograms by name in seconds or tokens."""

    ranks: tuple[RankView, ...] = ()
    waiting: int = 0
    running: int = 0
    histograms: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)
