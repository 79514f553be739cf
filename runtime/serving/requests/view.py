"""Records for the status page, without tokens or texts of clients: ranks, their last steps, and histograms."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

RankState = Literal["starting", "ready", "lost"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepNode:
    """A run of `tokens` tokens without a branch in the trie of a step; the output of `reads` of them is read.

    `parent` is the index of the node before it, -1 for a root. Cached tokens were not computed.
    """

    parent: int
    tokens: int
    is_cached: bool
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepView:
    """A finished step; `number` counts the steps since the rank became ready.

    `age_seconds` is the time since the step ended. `cached_tokens` counts each token that was read from the cache once.
    `unshared_flops` are the FLOPs if each request ran alone and without a cache. `nodes` is the trie, level by level,
    so that parents come first; `left_out` nodes exceed a limit of a few hundred.
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
    """The last step of an engine, None before the first, and the blocks of its cache: all, filled, and in use."""

    step: StepView | None = None
    cache_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    block_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """A rank as the router and the rank itself see it.

    `load_flops` and `open_requests` are the FLOPs and the number of all assigned requests, or parts of requests,
    without an answer. `saturation_flops` and `flops_per_second` are those of a full step, which hides the transfers of
    experts. At a load of `most_load_flops` or above, the rank takes no more work; None for no limit. `form_text` is a
    sentence with the form and the reason. `memory_bytes` are the bytes of each part of the device's memory during a
    full step, and `memory_limit_bytes` is the limit of their sum.
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
    memory_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_limit_bytes: float = 0.0


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
