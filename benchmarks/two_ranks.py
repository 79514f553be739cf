"""Weights instead of activations on real ranks: all resident, expert parallelism by AllToAll, and moepass, interleaved.

Every rank is a process with one thread on a core of its own, its copy thread included. A forward counts as long as its
slowest rank takes. Nothing is emulated unless --link says so.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from common import median_and_spread, print_table, verdict

from moepass.models.moe_stack import StackConfig, build_stack

RANKS = 2
VARIANTS = ("resident", "AllToAll", "pull", "collective")
# Tokens per rank and skew at which a ratio to AllToAll is asked for, and how much of resident throughput must be left.
AT_LEAST = {(4096, 0.0): 1.30, (4096, 2.0): 1.70}
AT_LEAST_OF_RESIDENT = 0.95


def main(
    tokens: str = "256,1024,4096",
    skews: str = "0,2",
    repeats: int = 7,
    layers: int = 6,
    link: str = "real",
) -> None:
    """Time forwards of TOKENS tokens per rank with routers of SKEWS (standard deviation of a fixed bias)."""
    cases = [(int(count), float(skew)) for skew in skews.split(",") for count in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(_rank, (store, queue, cases, repeats, layers, link), nprocs=RANKS)
        rows, holds = _rows([queue.get() for _ in cases])
    print_table(
        f"{RANKS} ranks, {layers} layers, hidden 512, 32 experts of width 256, top-4, fp32, link {link}",
        ["tokens/rank", "skew", *(f"{name} s" for name in VARIANTS), "AllToAll / pull", "resident / pull", "equal"],
        rows,
        f"median (least to most) of {repeats} forwards, each after one of its own kind. AllToAll / pull at least "
        + " and ".join(f"{value} at {count} tokens, skew {skew:g}" for (count, skew), value in AT_LEAST.items())
        + f", resident / pull there at least {AT_LEAST_OF_RESIDENT}: {verdict(holds)}.",
    )
    if not holds and link == "real":
        raise typer.Exit(1)


def _rows(results: list[dict[str, Any]]) -> tuple[list[list[object]], bool]:
    rows: list[list[object]] = []
    holds = True
    for result in results:
        seconds = result["seconds"]
        against = _ratio(seconds["AllToAll"], seconds["pull"])
        of_resident = _ratio(seconds["resident"], seconds["pull"])
        case = (result["tokens"], result["skew"])
        if case in AT_LEAST:
            holds = holds and against >= AT_LEAST[case] and of_resident >= AT_LEAST_OF_RESIDENT
        holds = holds and result["equal"]
        times = [median_and_spread(seconds[name]) for name in VARIANTS]
        rows.append([*case, *times, f"{against:.2f}", f"{of_resident:.2f}", verdict(result["equal"])])
    return rows, holds


def _ratio(left: list[float], right: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(left, right, strict=True))


def _rank(
    rank: int, store: str, queue: Any, cases: list[tuple[int, float]], repeats: int, layers: int, link: str
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with torch.no_grad():
        for count, skew in cases:
            torch._dynamo.reset()
            config = StackConfig(layers=layers, hidden=512, width=256, experts=32, top_k=4, skew=skew)
            variants, hidden, equal = _variants(config, count, rank, link)
            seconds = _interleaved(variants, hidden, repeats)
            slowest = {name: _slowest(times) for name, times in seconds.items()}
            if rank == 0:
                queue.put({"tokens": count, "skew": skew, "seconds": slowest, "equal": equal})
    dist.destroy_process_group()


def _variants(
    config: StackConfig, count: int, rank: int, link: str
) -> tuple[dict[str, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor, bool]:
    hidden = torch.randn(count, config.hidden, generator=torch.Generator().manual_seed(rank))
    resident = torch.compile(build_stack(config), backend="asyncep")
    exchanging = torch.compile(build_stack(config, "all_to_all"), backend="inductor")
    pulling = torch.compile(build_stack(config, "all_to_all"), backend="asyncep", options={"link": link})
    gathering_options = {"link": link, "transport": "collective", "timeout_s": 300.0}
    # A group of its own: all models of one group stream in the same way.
    stack = build_stack(config, "all_to_all", dist.new_group())
    gathering = torch.compile(stack, backend="asyncep", options=gathering_options)
    expected = resident(hidden)
    outputs = [exchanging(hidden), pulling(hidden), gathering(hidden)]
    equal = all(torch.allclose(output, expected, rtol=1e-4, atol=1e-4) for output in outputs)
    return dict(zip(VARIANTS, (resident, exchanging, pulling, gathering), strict=True)), hidden, equal


def _interleaved(
    variants: dict[str, Callable[[torch.Tensor], torch.Tensor]], hidden: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each timed forward of each variant on this rank; ranks begin each pair of forwards together."""
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


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


if __name__ == "__main__":
    typer.run(main)
