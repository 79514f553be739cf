"""What those see who look at a server: its ranks, the last step of each in sizes, and how long requests took.

No token and no text is in it, because they belong to clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from moepass.runtime.serving.requests.histogram import Histogram

RankState = Literal["starting", "ready", "lost"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepNode:
    """`tokens` tokens of a step's trie that follow each other without a branch.

    They come behind those of the node `parent`, an index of an earlier one, or -1. `is_cached`: they were read from the
    cache and not computed. At `reads` of them the output is read.
    """

    parent: int
    tokens: int
    is_cached: bool
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepView:
    """A step as it ran.

    number                of the step, since the rank is ready
    age_seconds           since it was over
    requests              that were in it
    tokens, flops         that were computed; `unshared_flops`: each request alone, without a cache
    cached_tokens         that were read from the cache, each once
    nodes                 of its trie, level by level, so that parents come first; some hundred of them at most
    left_out              nodes that are not among them, all below or beside these
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
    """An engine's last step, and the blocks of its cache: all, those that hold something, those that a step uses."""

    step: StepView | None = None
    cache_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    block_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RankView:
    """A rank as the router and the rank itself see it.

    load_flops          of all that it has and has not answered
    most_load_flops     it takes no more from so many on; None: it takes all there is
    saturation_flops    a step with so many is full: it hides the transfers of experts
    open_requests       that it has, or parts of them
    form                how it computes steps, a trie or padded rows; `form_text` says it in a sentence
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


@dataclasses.dataclass(frozen=True, slots=True)
class BackendView:
    """`running` requests are computed, `waiting` ones wait. `histograms` by name, in seconds or tokens."""

    ranks: tuple[RankView, ...] = ()
    waiting: int = 0
    running: int = 0
    histograms: Mapping[str, Histogram] = dataclasses.field(default_factory=dict)
