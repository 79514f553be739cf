"""Measure the cost of an idle rank: rank 0 runs forwards, while rank 1 does nothing after a first rendezvous."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

from benchmarks.common import interleaved_seconds, median_and_spread, print_table, verdict
from tests.helpers.models.moe_stack import StackConfig, build_stack

RANKS = 2
LIMIT = 1.03


def main(tokens: str = "4096,8192", repeats: int = 25, layers: int = 6) -> None:
    """Time forwards of TOKENS tokens on one rank while the other is idle."""
    counts = [int(text) for text in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(_rank, (str(Path(folder) / "store"), queue, counts, repeats, layers), nprocs=RANKS)
        results = [queue.get() for _ in counts]
    rows = []
    for count, seconds in zip(counts, results, strict=True):
        pairs = zip(seconds["pull"], seconds["alone"], strict=True)
        ratio = statistics.median(pull / alone for pull, alone in pairs)
        times = [median_and_spread(seconds[name]) for name in ("alone", "pull")]
        rows.append([count, *times, f"{ratio:.3f}", LIMIT, verdict(ratio <= LIMIT)])
    print_table(
        f"One loaded rank of {RANKS}, {layers} layers, hidden 512, 32 experts of width 256, top-4, fp32",
        ["tokens", "alone s", "pull, other rank idle s", "pull / alone", "at most", "holds"],
        rows,
        "median (least to most), interleaved; one thread on one core, the copy thread included.",
    )
    if any(row[-1] != "yes" for row in rows):
        raise typer.Exit(1)


def _rank(rank: int, store: str, queue: Any, counts: list[int], repeats: int, layers: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    config = StackConfig(layers=layers, hidden=512, width=256, experts=32, top_k=4)
    alone = torch.compile(build_stack(config), backend="asyncep")
    pulling = torch.compile(build_stack(config, "all_to_all"), backend="asyncep")
    with torch.no_grad():
        for count in counts:
            hidden = torch.randn(count, config.hidden, generator=torch.Generator().manual_seed(rank))
            pulling(hidden)
            if rank == 0:
                variants = {"alone": functools.partial(alone, hidden), "pull": functools.partial(pulling, hidden)}
                queue.put(interleaved_seconds(variants, repeats))
            dist.barrier()  # the idle rank waits here
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
