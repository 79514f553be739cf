"""Compare layers in the styles of other projects, compiled with asyncep and with Inductor, on two real ranks.

Every rank is a process with one thread on its own core, including its copy thread. A forward takes as long as its
slowest rank. Nothing is emulated.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn import functional as F

import moepass
from benchmarks.common import print_table, verdict
from tests.helpers.project_styles.exact_style import SlicesOfModules, SplitOfStacks
from tests.helpers.project_styles.megatron_style import MaskedDispatch
from tests.helpers.project_styles.slots_style import EinsumSlots, IndexedSlots
from tests.helpers.project_styles.style_sizes import StyleSizes

RANKS = 2
STYLES: dict[str, Any] = {
    "gshard": EinsumSlots,
    "deepspeed": IndexedSlots,
    "deepseek": SlicesOfModules,
    "torchtitan loop": SplitOfStacks,
    "megatron": MaskedDispatch,
}
# Styles, tokens per rank and skew with a target ratio.
AT_LEAST = {(4096, 0.0): 1.30, (4096, 2.0): 1.70}
ASKED = ("deepspeed", "megatron")


class Stack(nn.Module):
    """Layers of one style, each with a norm and a residual connection."""

    def __init__(self, style: str, layers: int, sizes: StyleSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(STYLES[style](sizes, dist.group.WORLD) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [tokens, H] after all layers."""
        for layer in self.layers:
            hidden = hidden + layer(F.rms_norm(hidden, hidden.shape[-1:]))
        return hidden


def main(
    styles: str = "deepspeed,megatron",
    tokens: int = 4096,
    skews: str = "0,2",
    repeats: int = 9,
    layers: int = 1,
) -> None:
    """Time forwards of TOKENS tokens per rank through LAYERS layers of each of STYLES.

    SKEWS are standard deviations of a fixed bias of the router. Inductor compiles every expert of the loops: with
    6 layers for more than 10 minutes.
    """
    cases = [(style, float(skew)) for style in styles.split(",") for skew in skews.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (str(Path(folder) / "store"), queue, cases, tokens, repeats, layers)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=RANKS)
        results = [queue.get() for _ in cases]
    print_table(
        f"{RANKS} ranks, {layers} layers, hidden 512, 32 experts of width 256, top-4, fp32, {tokens} tokens per rank, "
        "nothing emulated",
        ["style", "skew", "Inductor s", "asyncep s", "Inductor / asyncep", "asked", "equal"],
        [_row(result, tokens) for result in results],
        f"Median of {repeats} forwards (least to most), each after one of its own kind, in turns; ratio: median of "
        "those forward by forward.",
    )
    if any(_ratio(result) < (_asked(result, tokens) or 0) or not result["equal"] for result in results):
        raise typer.Exit(1)


def _row(result: dict[str, Any], tokens: int) -> list[object]:
    times = [
        f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        for seconds in result["seconds"].values()
    ]
    asked = _asked(result, tokens)
    return [
        result["style"], f"{result['skew']:g}", *times, f"{_ratio(result):.2f}",
        "" if asked is None else f"{asked:.2f}", verdict(result["equal"]),
    ]  # fmt: skip


def _ratio(result: dict[str, Any]) -> float:
    inductor, asyncep = result["seconds"].values()
    return statistics.median(
        inductor_seconds / asyncep_seconds for inductor_seconds, asyncep_seconds in zip(inductor, asyncep, strict=True)
    )


def _asked(result: dict[str, Any], tokens: int) -> float | None:
    return AT_LEAST.get((tokens, result["skew"])) if result["style"] in ASKED else None


def _rank(
    rank: int, store: str, queue: Any, cases: list[tuple[str, float]], tokens: int, repeats: int, layers: int
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with torch.no_grad():
        for style, skew in cases:
            torch._dynamo.reset()
            sizes = StyleSizes(hidden=512, width=256, experts=32, top_k=4, skew=skew)
            hidden = torch.randn(tokens, sizes.hidden, generator=torch.Generator().manual_seed(rank))
            expected = Stack(style, layers, sizes)(hidden)
            variants = {
                name: torch.compile(Stack(style, layers, sizes), backend=name) for name in ("inductor", "asyncep")
            }
            with moepass.record_compilations() as compilations:
                outputs = [run(hidden) for run in variants.values()]
            for compilation in compilations:
                assert not compilation.plan.refusals, str(compilation.plan.refusals[0])
                assert len(compilation.plan.local_blocks) == layers
            close = all(torch.allclose(output, expected, rtol=1e-3, atol=1e-4) for output in outputs)
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(repeats):
                for name, run in variants.items():
                    for is_timed in (False, True):
                        dist.barrier()
                        started = time.perf_counter()
                        run(hidden)
                        if is_timed:
                            seconds[name].append(time.perf_counter() - started)
            slowest = {name: _slowest(times) for name, times in seconds.items()}
            equal = _slowest([0.0 if close else 1.0]) == [0.0]
            if rank == 0:
                queue.put({"style": style, "skew": skew, "seconds": slowest, "equal": equal})
    dist.destroy_process_group()


def _slowest(values: list[float]) -> list[float]:
    """Return the largest of each of `values` over all ranks."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, dist.ReduceOp.MAX)
    return totals.tolist()


if __name__ == "__main__":
    typer.run(main)
