"""Compare resident experts, expert parallelism and moepass on real ranks, in turns.

    resident      all experts on every rank, compiled by moepass: the limit to approach
    EP eager      expert parallelism by AllToAll, uncompiled
    EP Inductor   the same, compiled by stock Inductor
    pull          the same, compiled by moepass: no exchange is left, experts are copied from the other rank's memory
    collective    as pull, but experts are gathered by AllGather

Every rank is a process with one thread on its own core, including its copy thread. A forward takes as long as its
slowest rank. Nothing is emulated unless --link says so.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

import moepass
from benchmarks.common import print_table, verdict
from benchmarks.parts.emulated_exchange import exchanges_take
from moepass.runtime.lowering.cpu_gemms import multiply
from tests.helpers.models.moe_stack import MoEStack, StackConfig, build_stack

RANKS = 2
VARIANTS = ("resident", "EP eager", "EP Inductor", "pull", "collective")
# Required ratios to expert parallelism, by tokens per rank and skew, and to resident experts.
AT_LEAST = {(4096, 0.0): 1.30, (4096, 2.0): 1.70}
AT_LEAST_OF_RESIDENT = 0.95
# NVLink of an H100 (450 GB/s each way) against its dense bf16 peak (989 TFLOP/s), both from the datasheet: weights of
# two bytes that arrive during one FLOP.
WEIGHTS_PER_FLOP_OF_8XH100 = 450e9 / 2 / 989e12


def main(
    tokens: str = "256,1024,4096",
    skews: str = "0,2",
    repeats: int = 15,
    layers: int = 6,
    link: str = "real",
    seed: int = 0,
) -> None:
    """Time forwards of TOKENS tokens per rank with routers of SKEWS (standard deviation of a fixed bias).

    LINK is "real", "emulate:BYTES_PER_S", or "8xh100": emulated, as slow against this CPU as NVLink is against an H100.
    It delays AllToAlls as it delays copies of weights.
    """
    if link == "8xh100":
        link = f"emulate:{WEIGHTS_PER_FLOP_OF_8XH100 * _flops_per_s() * 4:.0f}"
    cases = [(int(count), float(skew)) for skew in skews.split(",") for count in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        configs = [
            StackConfig(layers=layers, hidden=512, width=256, experts=32, top_k=4, skew=skew, seed=seed)
            for _, skew in cases
        ]
        counts = [count for count, _ in cases]
        torch.multiprocessing.spawn(_rank, (store, queue, configs, counts, repeats, link), nprocs=RANKS)
        results = [queue.get() for _ in cases]
    is_emulated = link != "real"
    print_table(
        f"{RANKS} ranks, {layers} layers, hidden 512, 32 experts of width 256, top-4, fp32, "
        + (f"link EMULATED at {float(link.split(':')[1]) / 1e6:.0f} MB/s" if is_emulated else "nothing emulated"),
        ["tokens", "skew", "load", *VARIANTS, "eager / pull", "Inductor / pull", "resident / pull", "equal"],
        [_row(result) for result in results],
        f"Tokens per rank; load: the busier rank's share of expert parallelism's work, 1 if both have half of it; "
        f"seconds: median of {repeats} forwards, each after one of its own kind, and the largest distance from it; "
        f"ratios: median of those forward by forward. {_crossover(results)}",
    )
    missed = [] if is_emulated else list(_missed(results))
    for line in missed:
        typer.echo(line)
    if missed or not all(result["equal"] for result in results):
        raise typer.Exit(1)


def _row(result: dict[str, Any]) -> list[object]:
    times = [_middle(result["seconds"][name]) for name in VARIANTS]
    ratios = [f"{_against_pull(result, name):.2f}" for name in ("EP eager", "EP Inductor", "resident")]
    load = f"{result['load']:.2f}"
    return [result["tokens"], f"{result['skew']:g}", load, *times, *ratios, verdict(result["equal"])]


def _middle(seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.3f} ±{max(max(seconds) - middle, middle - min(seconds)) / middle:.0%}"


def _against_pull(result: dict[str, Any], name: str) -> float:
    pairs = zip(result["seconds"][name], result["seconds"]["pull"], strict=True)
    return statistics.median(exchange / pull for exchange, pull in pairs)


def _missed(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a message for each missed target, against each form of the baseline."""
    for result in results:
        case = (result["tokens"], result["skew"])
        if case not in AT_LEAST:
            continue
        wanted = {"EP eager": AT_LEAST[case], "EP Inductor": AT_LEAST[case], "resident": AT_LEAST_OF_RESIDENT}
        for name, least in wanted.items():
            reached = _against_pull(result, name)
            if reached < least:
                yield f"{case[0]} tokens, skew {case[1]:g}: {name} / pull is {reached:.2f}, not {least}"


def _crossover(results: list[dict[str, Any]]) -> str:
    """Return the number of tokens up to which expert parallelism is faster, interpolated linearly."""
    texts = []
    for skew in dict.fromkeys(result["skew"] for result in results):
        of_skew = sorted((result for result in results if result["skew"] == skew), key=lambda one: int(one["tokens"]))
        points = [(math.log2(result["tokens"]), _against_pull(result, "EP Inductor")) for result in of_skew]
        texts.append(f"skew {skew:g}: {_crossing(points)}")
    return f"EP under Inductor is the faster form {', '.join(texts)}."


def _crossing(points: list[tuple[float, float]]) -> str:
    for (left, before), (right, after) in itertools.pairwise(points):
        if before < 1 <= after:
            return f"below about {2 ** (left + (1 - before) / (after - before) * (right - left)):.0f} tokens"
    if points[0][1] >= 1:
        return f"nowhere from {2 ** points[0][0]:.0f} tokens on"
    return f"up to {2 ** points[-1][0]:.0f} tokens and more"


def _rank(
    rank: int, store: str, queue: Any, configs: list[StackConfig], counts: list[int], repeats: int, link: str
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.recompile_limit = 64
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with torch.no_grad():
        for config, count in zip(configs, counts, strict=True):
            torch._dynamo.reset()
            hidden = torch.randn(count, config.hidden, generator=torch.Generator().manual_seed(rank))
            variants, expected = _variants(config, link)
            wanted = expected(hidden)
            with moepass.record_compilations() as compilations:
                outputs = [run(hidden) for run in variants.values()]  # on every rank, because ranks communicate
            for compilation in compilations:
                assert not compilation.plan.refusals, compilation.plan.refusals[0].reason
            close = all(_is_close(output, wanted) for output in outputs)
            seconds = _interleaved(variants, hidden, repeats)
            slowest = {name: _slowest(times) for name, times in seconds.items()}
            result = {"tokens": count, "skew": config.skew, "seconds": slowest, "load": _load(expected, hidden)}
            equal = _slowest([0.0 if close else 1.0]) == [0.0]
            if rank == 0:
                queue.put({**result, "equal": equal})
    dist.destroy_process_group()


def _variants(config: StackConfig, link: str) -> tuple[dict[str, Callable[[torch.Tensor], torch.Tensor]], MoEStack]:
    """Return the compiled variants, and the uncompiled model with all experts."""
    exchanging = build_stack(config, "all_to_all")
    if link != "real":
        exchanging = exchanges_take(exchanging, float(link.split(":")[1]))
    # A separate group, because all models of one group stream in the same way.
    gathering = build_stack(config, "all_to_all", dist.new_group())
    expected = build_stack(config)
    options = {"link": link}
    variants = {
        "resident": torch.compile(expected, backend="asyncep"),
        "EP eager": exchanging,
        "EP Inductor": torch.compile(exchanging, backend="inductor"),
        "pull": torch.compile(build_stack(config, "all_to_all"), backend="asyncep", options=options),
        "collective": torch.compile(
            gathering, backend="asyncep", options={**options, "transport": "collective", "timeout_s": 300.0}
        ),
    }
    return {name: variants[name] for name in VARIANTS}, expected


def _interleaved(
    variants: dict[str, Callable[[torch.Tensor], torch.Tensor]], hidden: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of each timed forward of each variant on this rank; ranks begin pairs together."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            dist.barrier()
            run(hidden)
            dist.barrier()
            started = time.perf_counter()
            run(hidden)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _is_close(outputs: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if outputs are equal up to rounding, except one token in 1000 where routers may tie."""
    is_far = ((outputs - wanted).abs() > 1e-4 + 1e-4 * wanted.abs()).any(dim=1)
    return int(is_far.sum()) <= len(is_far) // 1000


def _load(model: MoEStack, hidden: torch.Tensor) -> float:
    """Return the load of the busiest rank relative to an equal load, as the mean over layers."""
    chosen: list[torch.Tensor] = []
    hooks = [layer.router.register_forward_hook(lambda _, __, out: chosen.append(out[0])) for layer in model.moe]
    model(hidden)
    for hook in hooks:
        hook.remove()
    per_rank = torch.stack([(index * RANKS // 32).flatten().bincount(minlength=RANKS) for index in chosen]).double()
    dist.all_reduce(per_rank)
    return float((per_rank.amax(1) / per_rank.mean(1)).mean())


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def _flops_per_s() -> float:
    """Return the rate of one thread in a large fp32 GEMM, as experts use it."""
    torch.set_num_threads(1)
    left = torch.randn(1024, 1024)
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        multiply(left, left)
        seconds.append(time.perf_counter() - started)
    return 2 * 1024**3 / statistics.median(seconds)


if __name__ == "__main__":
    typer.run(main)
