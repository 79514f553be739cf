"""Compile time by depth: whole-graph Inductor against segments compiled once each. Fresh cache, fresh process each."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import typer
from common import print_table, reference_model, verdict

import moepass

LIMIT = 0.40
VARIANTS = ("inductor", "asyncep resident", "asyncep streaming")

app = typer.Typer(add_completion=False)


@app.command()
def compare(depths: str = "4,12,48", limit_at: int = 48, repeats: int = 3) -> None:
    """Print a table of compile times and distinct segments for each depth; REPEATS times for LIMIT_AT layers."""
    rows: list[list[object]] = []
    holds = True
    segments: set[int] = set()
    for depth in [int(text) for text in depths.split(",")]:
        turns = range(repeats if depth == limit_at else 1)
        results = [{variant: _in_fresh_process(variant, depth) for variant in VARIANTS} for _ in turns]
        whole, resident, streaming = (_middle([turn[variant] for turn in results]) for variant in VARIANTS)
        ratio = streaming["seconds"] / whole["seconds"]
        segments.add(int(streaming["segments"]))
        if depth == limit_at:
            holds = ratio <= LIMIT
        rows.append(
            [
                depth,
                f"{whole['seconds']:.1f}",
                f"{resident['seconds']:.1f}",
                f"{streaming['seconds']:.1f}",
                f"{ratio:.2f}",
                int(streaming["segments"]),
                f"{streaming['difference']:.1e}",
            ]
        )
    holds = holds and len(segments) == 1
    print_table(
        "Seconds to the end of the first call, by depth",
        ["layers", "Inductor, whole graph", "asyncep resident", "asyncep streaming", "ratio", "segments", "difference"],
        rows,
        f"At {limit_at} layers the median of {repeats} turns. ratio: streaming / Inductor, at most {LIMIT} at "
        f"{limit_at} layers and segments equal at every depth: {verdict(holds)}. difference: largest, relative to the "
        "largest logit of the uncompiled model.",
    )
    if not holds:
        raise typer.Exit(1)


@app.command(hidden=True)
def measure(variant: str, layers: int) -> None:
    """One measurement in this process; prints JSON."""
    model = reference_model(layers)
    ids = torch.randint(0, 1024, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = model(ids).logits
        if variant == "asyncep streaming":
            moepass.offload_experts(model)
        compiled = torch.compile(model, backend=variant.split()[0])
        started = time.perf_counter()
        logits = compiled(ids).logits
        seconds = time.perf_counter() - started
    difference = float((logits - expected).abs().max() / expected.abs().max())
    segments = compilations[0].plan.distinct_segments if compilations else 0
    print(json.dumps({"seconds": seconds, "difference": difference, "segments": segments}))


def _middle(measured: list[dict[str, float]]) -> dict[str, float]:
    """Of each number the median over turns."""
    return {name: statistics.median(one[name] for one in measured) for name in measured[0]}


def _in_fresh_process(variant: str, layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "measure", variant, str(layers)]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


if __name__ == "__main__":
    app()
