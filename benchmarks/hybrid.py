"""Compare home `hybrid` with max(W·(N-1)/N ÷ peer link, W/N ÷ host link), on real ranks and EMULATED links.

    peer     1/N on each rank's device: W·(N-1)/N over the peer link
    host     everything in host memory: W over the host link of one rank
    hybrid   1/N of host memory over the host link into staging buffers, W·(N-1)/N of them over the peer link
    alone    hybrid with idle peers, whose staging buffers serve the rank that runs

W is the size of a bank in bytes. Every rank has its own peer link and host link. A transfer really copies, and then
waits until bytes / bandwidth seconds have passed. Few tokens are computed, so that transfers dominate. A forward takes
as long as its slowest rank, and follows an untimed forward of the same variant.
"""

from __future__ import annotations

import functools
import gc
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

import moepass
from benchmarks.common import print_table, verdict
from tests.helpers.models.moe_stack import StackConfig, build_stack

LIMIT = 1.10
VARIANTS = ("peer", "host", "hybrid", "alone")


def main(
    ranks: int = 2,
    layers: int = 6,
    tokens: int = 64,
    repeats: int = 3,
    staging_buffers: int = 2,
    links: str = "200:400,200:200,400:125",
) -> None:
    """Time forwards of TOKENS tokens over LINKS, pairs of MB/s, peer:host."""
    pairs = [tuple(float(rate) * 1e6 for rate in pair.split(":")) for pair in links.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        arguments = (ranks, store, queue, layers, tokens, repeats, staging_buffers, pairs)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        results = [queue.get() for _ in pairs]
    rows = [_row(result, ranks, name) for result in results for name in VARIANTS]
    print_table(
        f"{ranks} ranks, {layers} layers of {results[0]['bank_bytes'] / 1e6:.1f} MB, {tokens} tokens, "
        f"{staging_buffers} staging buffers, 2 slots, both links EMULATED",
        [
            "peer MB/s",
            "host MB/s",
            "home",
            "predicted s",
            "measured s",
            "of predicted",
            "from staging buffers",
            "holds",
            "equal",
        ],
        rows,
        f"predicted: layers times max(transfer, compute), compute measured with resident experts; measured: median of "
        f"{repeats} and the largest distance from it; holds: hybrid takes at most {LIMIT} of what is predicted",
    )
    if any(row[-2] == "NO" or row[-1] == "NO" for row in rows):
        raise typer.Exit(1)


def _row(result: dict[str, Any], ranks: int, name: str) -> list[object]:
    bank, (peer, host) = result["bank_bytes"], result["links"]
    over_peer, over_host = bank * (ranks - 1) / ranks / peer, bank / ranks / host
    transfer = {"peer": over_peer, "host": bank / host}.get(name, max(over_peer, over_host))
    predicted = result["layers"] * max(transfer, result["compute"])
    measured = statistics.median(result["seconds"][name])
    spread = max(abs(value - measured) for value in result["seconds"][name])
    is_hybrid = name in ("hybrid", "alone")
    return [
        f"{peer / 1e6:g}",
        f"{host / 1e6:g}",
        name,
        f"{predicted:.3f}",
        f"{measured:.3f} ±{spread / measured:.0%}",
        f"{measured / predicted:.3f}",
        f"{result['staged'][name]:.0%}" if is_hybrid else "",
        verdict(measured <= LIMIT * predicted) if is_hybrid else "",
        verdict(result["equal"]),
    ]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    queue: Any,
    layers: int,
    tokens: int,
    repeats: int,
    staging_buffers: int,
    pairs: list[tuple[float, float]],
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    config = StackConfig(layers=layers, hidden=512, width=256, experts=32, top_k=4)
    hidden = torch.randn(tokens, config.hidden, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        for links in pairs:
            result = _measure(config, hidden, links, staging_buffers, repeats)
            if rank == 0:
                queue.put({**result, "links": links, "layers": layers})
    dist.destroy_process_group()


def _measure(
    config: StackConfig, hidden: torch.Tensor, links: tuple[float, float], staging_buffers: int, repeats: int
) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    resident = build_stack(config)
    bank_bytes = sum(value.nbytes for value in resident.moe[0].experts.parameters())
    expected = resident(hidden)
    models = {name: build_stack(config) for name in ("peer", "host", "hybrid")}
    peer, host = (f"emulate:{rate}" for rate in links)
    moepass.offload_experts(models["peer"], moepass.Peer(link=peer))
    moepass.offload_experts(models["host"], moepass.Host(link=host))
    report = moepass.offload_experts(
        models["hybrid"], moepass.Hybrid(link=peer, host_link=host, staging_buffers=staging_buffers)
    )
    compiled = {
        name: torch.compile(model, backend="asyncep", options={"lower": "eager"})
        for name, model in {"resident": resident, **models}.items()
    }
    equal = _slowest([float(not torch.equal(run(hidden), expected)) for run in compiled.values()]) == [0.0] * 4
    compute = statistics.median(_seconds(functools.partial(compiled["resident"], hidden), repeats)) / config.layers
    figures = report.store.ring().statistics
    seconds: dict[str, list[float]] = {}
    staged: dict[str, float] = {}
    for name in VARIANTS:
        before = figures.staged_bytes, figures.unstaged_bytes
        run = functools.partial(compiled["hybrid" if name == "alone" else name], hidden)
        seconds[name] = _seconds(run, repeats, is_alone=name == "alone")
        from_buffers, past_buffers = figures.staged_bytes - before[0], figures.unstaged_bytes - before[1]
        staged[name] = from_buffers / max(1, from_buffers + past_buffers)
    return {"bank_bytes": bank_bytes, "seconds": seconds, "compute": compute, "staged": staged, "equal": equal}


def _seconds(run: Callable[[], object], repeats: int, is_alone: bool = False) -> list[float]:
    """Return the seconds of the slowest rank; ranks begin each pair of forwards together, or rank 0 runs alone."""
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        taken = 0.0
        if dist.get_rank() == 0 or not is_alone:
            run()
            started = time.perf_counter()
            run()
            taken = time.perf_counter() - started
        seconds.append(taken)
    return _slowest(seconds)


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


if __name__ == "__main__":
    typer.run(main)
