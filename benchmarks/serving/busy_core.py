"""Measure what a server loses while another program computes on one of its cores.

    python -m benchmarks.serving.busy_core [--seconds 15] [--turns 3]

`moepass serve` runs a model of 8 layers in fp32 with one rank and a thread for each core. Clients send their next
request, of four prompts of 400 uncached tokens, when they are answered. Phases without and with a program that computes
without a pause on one core alternate. In the last phase of each turn, that program runs too, and clients send three
times as many requests as the server can answer.

Passes if the throughput beside the program is at least 0.45 of the throughput without, and 99 of 100 refusals take less
than 50 ms for their client.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

from benchmarks.common import median_and_spread
from benchmarks.serving.overload import MOST_REFUSAL_SECONDS, percentile, phase
from benchmarks.serving.served import served_process
from benchmarks.serving.serving_workloads import SMALL_FP32, random_model
from benchmarks.serving.shared import print_table, verdict

CLIENTS, OVERLOAD = 4, 3
QUEUE_SECONDS = 10.0
LEAST_THROUGHPUT = 0.45
BUSY = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Run a program that computes on one core."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as program:
        try:
            yield
        finally:
            program.kill()


def main(seconds: float = 15.0, turns: int = 3) -> None:
    """Alternate phases of SECONDS each, TURNS times."""
    quiet, busy, refusals = [], [], []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        random_model(SMALL_FP32, Path(folder))
        arguments = [folder, "--kv-cache", "off", "--queue-seconds", str(QUEUE_SECONDS)]
        with served_process(arguments, {**os.environ, "MOEPASS_CACHE_DIR": ""}, log) as served:
            phase(served, seconds, "closed", CLIENTS)  # warm up code and the server's estimate of its rate
            for _ in range(turns):
                quiet.append(phase(served, seconds, "closed", CLIENTS).answered_per_s)
                with busy_core():
                    busy.append(phase(served, seconds, "closed", CLIENTS).answered_per_s)
                    overload = phase(served, seconds, "open", OVERLOAD * quiet[-1])
                refusals += overload.found["seconds_by_status"].get("429", [])
    ratios = [late / early for early, late in zip(quiet, busy, strict=True)]
    refused = percentile(refusals, 0.99)
    is_fast, is_prompt = sorted(ratios)[turns // 2] >= LEAST_THROUGHPUT, refused < MOST_REFUSAL_SECONDS
    rows = [
        ["requests/s, nothing else running", median_and_spread(quiet)],
        ["requests/s, one core busy", median_and_spread(busy)],
        ["ratio", median_and_spread(ratios)],
        [f"ratio at least {LEAST_THROUGHPUT}", verdict(is_fast)],
        ["refusals, one core busy: count, 99 % ms", f"{len(refusals)}, {1000 * refused:.1f}"],
        [f"99 of 100 refusals within {1000 * MOST_REFUSAL_SECONDS:.0f} ms", verdict(is_prompt)],
    ]
    print_table("moepass serve beside a program that computes on one core", ["", "measured"], rows)
    if not (is_fast and is_prompt):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
