"""Measure how many requests per second the router handles on one core, and how well each policy routes.

    python -m benchmarks.serving.routing

The workloads are those of arXiv 2605.02960 (numbers and lengths as in `published.py`), shuffled into one stream and
scaled to REQUESTS. Their texts are not published; the shared fraction of a prompt, and the number of prompts that share
it, are assumptions (`SHARING`). Ranks are simulated: a step takes the time of its FLOPs by the formulas, and at least
that of the transfer that it hides. The events of a simulation are then replayed to a new router, and only this is
timed, without the block events, whose number grows with the cache.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import heapq
import random
import time
from collections.abc import Callable, Sequence

import typer

from benchmarks.serving.shared import REAL, print_table, real_shape, verdict
from benchmarks.serving.simple_routers import LeastTokensRouter, RoundRobinRouter
from moepass.models.formulas.attention import score_flops
from moepass.models.formulas.layers import flops_per_token
from moepass.models.formulas.saturation import GAMMA
from moepass.models.sizes.presets import preset
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import Assignment, RoutableRequest
from moepass.runtime.serving.router.router import RankRouter

MODEL = preset("qwen3-235b-a22b")
LEAST_REQUESTS_PER_S = 100_000

# For each workload, the shared fraction of a prompt, and the number of prompts that share it. Both are assumptions: the
# publication says only high (MoralStories, QuALITY), medium (ArXiv) and low.
SHARING = {
    "MoralStories": (0.75, 48),
    "MMLU": (0.1, 400),
    "BoolQ": (0.0, 1),
    "IMDB": (0.0, 1),
    "QuALITY": (0.95, 10),
    "ArXiv": (0.5, 4),
}


@dataclasses.dataclass(frozen=True)
class FullAttentionFlops:
    """The FLOPs of a model in which every layer attends to all previous tokens."""

    per_token: int
    per_pair: int

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        """Return the FLOPs of `new_tokens` tokens after a prefix."""
        pairs = new_tokens * (2 * prefix_tokens + new_tokens + 1) // 2
        return self.per_token * new_tokens + self.per_pair * pairs


def formula() -> FullAttentionFlops:
    """Return the formula for the FLOPs of the model."""
    per_token = per_pair = 0
    for layer, count in MODEL.layer_counts.items():
        attention = layer.attention
        per_token += count * flops_per_token(layer, MODEL.hidden)
        per_pair += count * int(score_flops(1, attention.heads, attention.head_dim, attention.value_head_dim))
    return FullAttentionFlops(per_token, per_pair)


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request, and its blocks that other requests share."""

    request: RoutableRequest
    shared_blocks: tuple[int, ...]


def stream(count: int) -> list[Sent]:
    """Return `count` requests of all workloads in proportion, in a random order that is the same in every run."""
    draw = random.Random(0)
    shape = real_shape()
    scale = count / sum(workload.requests for workload in REAL)
    prompts: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for workload in REAL:
        shared_part, group = SHARING[workload.name]
        prefix: tuple[int, ...] = ()
        for number in range(round(workload.requests * scale)):
            ratio = workload.longest / workload.shortest
            tokens = round(workload.shortest * ratio ** (draw.random() ** shape))
            reusable = (tokens - 1) // BLOCK_TOKENS
            if number % group == 0:
                prefix = tuple(draw.getrandbits(63) for _ in range(int(reusable * shared_part)))
            shared = prefix[:reusable]
            prompts.append((tokens, shared, tuple(draw.getrandbits(63) for _ in range(reusable - len(shared)))))
    draw.shuffle(prompts)
    return [
        Sent(RoutableRequest(str(index), (*shared, *suffix), tokens), shared)
        for index, (tokens, shared, suffix) in enumerate(prompts)
    ]


@dataclasses.dataclass(frozen=True)
class Events:
    """The events of one round, in order: block reports, finished work, new requests, the routing, started work."""

    rank: int
    stored: list[int]
    evicted: list[int]
    done: list[int]
    arrived: list[RoutableRequest]
    now: float
    started: list[int]


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of simulated ranks; `idle` is the fraction of their time in which they computed nothing."""

    events: list[Events]
    assignments: list[Assignment]
    computed_flops: int
    idle: float
    makespan: float


class Rank:
    """A simulated rank. A step takes assignments up to a threshold of FLOPs; the cache keeps recently used blocks."""

    def __init__(self, cache_blocks: int) -> None:
        self.assigned: collections.deque[Assignment] = collections.deque()
        self.step: list[Assignment] = []
        self.cache: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.cache_blocks = cache_blocks
        self.computed = 0

    def next_step(self, threshold: int) -> int:
        """Start a step with the next assignments, and return its FLOPs."""
        self.step = []
        flops = 0
        while self.assigned and flops < threshold:
            self.step.append(self.assigned.popleft())
            flops += self.step[-1].flops
        self.computed += flops
        return flops

    def keep(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cache blocks, and return the new ones and the evicted ones."""
        new = [block for block in blocks if block not in self.cache]
        for block in reversed(blocks):  # the last blocks are evicted first
            self.cache[block] = None
            self.cache.move_to_end(block)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.cache_blocks)]
        return new, gone


def run(
    router: RankRouter, sent: Sequence[Sent], ranks: Sequence[Rank], threshold: int, outstanding: int, step_floor: float
) -> Run:
    """Simulate all of `sent`, at most `outstanding` at a time. A step takes its FLOPs, at least `step_floor`."""
    by_id = {request.request.id: request for request in sent}
    steps: list[tuple[float, int]] = []
    log: list[Events] = []
    assignments: list[Assignment] = []
    events = Events(0, [], [], [], [request.request for request in sent[:outstanding]], 0.0, [])
    answered = 0
    while True:
        made = apply(router, events)
        assignments += made
        for assignment in made:
            ranks[assignment.rank].assigned.append(assignment)
        for number, rank in enumerate(ranks):
            if not rank.step and rank.assigned:
                heapq.heappush(steps, (events.now + max(rank.next_step(threshold), step_floor), number))
                events.started.extend(assignment.number for assignment in rank.step)
        for started in events.started:
            router.started(started)
        log.append(events)
        if not steps:
            break
        now, number = heapq.heappop(steps)
        ending, ranks[number].step = ranks[number].step, []
        position = outstanding + answered
        answered += len(ending)
        arrived = [request.request for request in sent[position : outstanding + answered]]
        events = Events(number, [], [], [assignment.number for assignment in ending], arrived, now, [])
        if ranks[number].cache_blocks:
            for assignment in ending:
                stored, evicted = ranks[number].keep(by_id[assignment.request_id].shared_blocks)
                events.stored.extend(stored)
                events.evicted.extend(evicted)
    if answered < len(sent) or any(router.loads) or router.queue.count or router.tables.pending:
        raise SystemExit(f"{answered} of {len(sent)} requests are done, loads {router.loads} are left")
    computed = sum(rank.computed for rank in ranks)
    return Run(log, assignments, computed, 1 - computed / (events.now * len(ranks)), events.now)


def apply(router: RankRouter, events: Events) -> list[Assignment]:
    """Apply all events except the starts, which follow from the returned assignments."""
    apply_blocks(router, events)
    for number in events.done:
        router.done(number)
    for request in events.arrived:
        router.submit(request)
    return router.route(events.now).assignments


def apply_blocks(router: RankRouter, events: Events) -> None:
    """Report the block events to the router."""
    for block in events.stored:
        router.block_stored(events.rank, block)
    for block in events.evicted:
        router.block_evicted(events.rank, block)


def replay(router: RankRouter, run: Run) -> float:
    """Return the processor seconds of the router alone for the same events; its decisions are discarded."""
    gc.collect()
    gc.freeze()
    began = time.process_time()
    for events in run.events:
        apply(router, events)
        for number in events.started:
            router.started(number)
    seconds = time.process_time() - began
    gc.unfreeze()
    return seconds


def block_seconds(router: RankRouter, run: Run) -> float:
    """Return the processor seconds of the block events alone."""
    began = time.process_time()
    for events in run.events:
        apply_blocks(router, events)
    return time.process_time() - began


def main(
    requests: int = 100_000,
    ranks: int = 16,
    saturation_tokens: int = 65_536,
    outstanding: int = 8192,
    cache_tokens: int = 262_144,
    repeats: int = 3,
) -> None:
    """Route REQUESTS requests over RANKS ranks, at most OUTSTANDING of them at a time."""
    sent = stream(requests)
    flops = formula()
    alone = sum(flops.flops(0, request.request.prompt_tokens) for request in sent)
    threshold = saturation_tokens * flops.per_token

    def prefix() -> RankRouter:
        # The rate cancels out, because no request has a deadline.
        return PrefixRouter(
            ranks, flops, saturation_flops=threshold, flops_per_second=1.0, keeps_blocks=cache_tokens > 0
        )

    variants: dict[str, tuple[Callable[[], RankRouter], int]] = {
        "prefix": (prefix, outstanding),
        "prefix, all at once": (prefix, len(sent)),
        "round robin": (lambda: RoundRobinRouter(ranks, flops, keeps_blocks=cache_tokens > 0), outstanding),
        "least tokens": (lambda: LeastTokensRouter(ranks, flops, keeps_blocks=cache_tokens > 0), outstanding),
    }
    runs: dict[str, Run] = {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name, (build, at_most) in variants.items():
        machines = [Rank(cache_tokens // BLOCK_TOKENS) for _ in range(ranks)]
        runs[name] = run(build(), sent, machines, threshold, at_most, threshold / GAMMA)
    for _ in range(repeats):
        for name, (build, _) in variants.items():
            seconds[name].append(replay(build(), runs[name]) - block_seconds(build(), runs[name]))
    rows = []
    for name, result in runs.items():
        rates = sorted(len(sent) / duration for duration in seconds[name])
        saved = 1 - result.computed_flops / alone
        speed = runs["round robin"].makespan / result.makespan
        enough = verdict(rates[-1] >= LEAST_REQUESTS_PER_S)
        spread = f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
        rows.append([name, spread, f"{saved:.1%}", f"{result.idle:.1%}", f"{speed:.2f}", enough])
    prompt_tokens = sum(request.request.prompt_tokens for request in sent)
    print_table(
        f"{len(sent):,} requests, {prompt_tokens / 1e6:.1f}M tokens, {ranks} ranks, "
        f"threshold {saturation_tokens} tokens, {cache_tokens} tokens of cache each",
        ["policy", "requests/s", "FLOPs saved", "idle", "speed", f"{LEAST_REQUESTS_PER_S:,}/s"],
        rows,
        f"Requests per second of processor time: submitted, routed, started, done; {repeats} runs, interleaved.\n"
        "Saved: of the FLOPs without any sharing. Idle: ranks without work, or in steps below saturation. Speed: that "
        "of the simulated ranks, 1 for round robin.",
    )
    if any(row[-1] != "yes" for row in rows[:2]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
