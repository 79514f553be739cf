"""How many requests a second the router takes through their whole life on one core, and how well each policy routes.

    python benchmarks/routing.py

The workloads are those of arXiv 2605.02960 (numbers and lengths as in `published.py`), shuffled into one stream and
scaled to REQUESTS. Their texts are not published with them; how much of a prompt is shared, and by how many, is ours
(`SHARING`). Ranks are simulated: what a round assigns is started at once and done before the next round. Nothing is
computed, so FLOPs are those of the formulas, and seconds are those of the router alone.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence

import typer
from common import print_table, verdict
from published import REAL, real_shape

from moepass.models.formulas.attention import score_flops
from moepass.models.formulas.layers import flops_per_token
from moepass.models.sizes.presets import preset
from moepass.runtime.serving.batching.step_batch import BLOCK_TOKENS
from moepass.runtime.serving.router.prefix_router import PrefixRouter
from moepass.runtime.serving.router.routable import RoutableRequest
from moepass.runtime.serving.router.router import Router
from moepass.runtime.serving.router.simple_routers import LeastTokensRouter, RoundRobinRouter

MODEL = preset("qwen3-235b-a22b")
LEAST_REQUESTS_PER_S = 100_000

# Of each workload: the part of a prompt that others begin with as well, and how many they are. Ours: the publication
# says only high (MoralStories, QuALITY), medium (ArXiv) and low.
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
    """FLOPs of a model whose every layer sees all tokens before."""

    per_token: int
    per_pair: int

    def flops(self, prefix_tokens: int, new_tokens: int) -> int:
        pairs = new_tokens * (2 * prefix_tokens + new_tokens + 1) // 2
        return self.per_token * new_tokens + self.per_pair * pairs


def formula() -> FullAttentionFlops:
    per_token = per_pair = 0
    for layer, count in MODEL.layer_counts.items():
        attention = layer.attention
        per_token += count * flops_per_token(layer, MODEL.hidden)
        per_pair += count * int(score_flops(1, attention.heads, attention.head_dim, attention.value_head_dim))
    return FullAttentionFlops(per_token, per_pair)


def stream(count: int) -> list[RoutableRequest]:
    """`count` requests, all workloads in proportion, in random order, the same in every run."""
    draw = random.Random(0)
    shape = real_shape()
    scale = count / sum(workload.requests for workload in REAL)
    prompts: list[tuple[tuple[int, ...], int]] = []
    for workload in REAL:
        shared_part, group = SHARING[workload.name]
        prefix: list[int] = []
        for number in range(round(workload.requests * scale)):
            ratio = workload.longest / workload.shortest
            tokens = round(workload.shortest * ratio ** (draw.random() ** shape))
            reusable = (tokens - 1) // BLOCK_TOKENS
            if number % group == 0:
                prefix = [draw.getrandbits(63) for _ in range(int(reusable * shared_part))]
            shared = prefix[:reusable]
            prompts.append((tuple(shared + [draw.getrandbits(63) for _ in range(reusable - len(shared))]), tokens))
    draw.shuffle(prompts)
    return [RoutableRequest(str(place), blocks, tokens) for place, (blocks, tokens) in enumerate(prompts)]


def run(router: Router, requests: Sequence[RoutableRequest], ranks: int, wave: int) -> tuple[float, list[int], int]:
    """Seconds of the router, the FLOPs that each rank computed, and rounds; `wave` requests arrive before a round."""
    computed = [0] * ranks
    place = rounds = answered = 0
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    while answered < len(requests):
        for request in requests[place : place + wave]:
            router.submit(request)
        place += wave
        assignments = router.route(rounds).assignments
        for assignment in assignments:
            router.started(assignment.number)
        for assignment in assignments:
            router.done(assignment.number)
            computed[assignment.rank] += assignment.flops
        answered += len(assignments)
        rounds += 1
    seconds = time.perf_counter() - began
    gc.unfreeze()
    assert not any(router.loads)
    return seconds, computed, rounds


def main(
    requests: int = 100_000, ranks: int = 16, saturation_tokens: int = 65_536, wave: int = 2048, repeats: int = 3
) -> None:
    """Route REQUESTS requests over RANKS ranks, WAVE of them arriving before each round."""
    sent = stream(requests)
    flops = formula()
    alone = sum(flops.flops(0, request.prompt_tokens) for request in sent)
    threshold = saturation_tokens * flops.per_token

    def prefix() -> Router:
        # The rate cancels out here: no request has a deadline.
        return PrefixRouter(ranks, flops, saturation_flops=threshold, flops_per_second=1e15, keeps_blocks=False)

    variants: dict[str, tuple[Callable[[], Router], int]] = {
        "prefix": (prefix, wave),
        "prefix, all at once": (prefix, len(sent)),
        "round robin": (lambda: RoundRobinRouter(ranks, flops, keeps_blocks=False), wave),
        "least tokens": (lambda: LeastTokensRouter(ranks, flops, keeps_blocks=False), wave),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    results = {}
    for _ in range(repeats):
        for name, (build, arriving) in variants.items():
            seconds, computed, rounds = run(build(), sent, ranks, arriving)
            rates[name].append(len(sent) / seconds)
            results[name] = (computed, rounds)
    rows = []
    for name, (computed, rounds) in results.items():
        imbalance = max(computed) * ranks / sum(computed) - 1
        rate = max(rates[name])
        spread = f"{min(rates[name]):,.0f} to {rate:,.0f}"
        saved = 1 - sum(computed) / alone
        rows.append([name, spread, rounds, f"{imbalance:.2%}", f"{saved:.1%}", verdict(rate >= LEAST_REQUESTS_PER_S)])
    print_table(
        f"{len(sent):,} requests, {sum(one.prompt_tokens for one in sent) / 1e6:.1f}M tokens, {ranks} ranks, "
        f"threshold {saturation_tokens} tokens",
        ["policy", "requests/s", "rounds", "imbalance", "FLOPs saved", f"at least {LEAST_REQUESTS_PER_S:,}/s"],
        rows,
        f"submitted, routed, started, done; {repeats} runs, interleaved. Imbalance: most of a rank against the mean.",
    )
    if any(row[-1] != "yes" for row in rows[:2]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
