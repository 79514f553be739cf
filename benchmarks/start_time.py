"""Seconds from calling `moepass score demo` on one text to its end: first start, with empty caches, and second start.

Each start is a process of its own. Beside the wall time stands the time of the processors, of compilers too, which
other programs on the machine change less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import typer
from common import median_and_spread, print_table, verdict

COMMAND = "import sys; sys.argv[0] = 'moepass'; from moepass.cli.main import main; main()"
TEXT = '{"text": "hello world"}\n'
# Of the first start's time that the second one may take.
MOST_OF_FIRST = 0.3


def main(repeats: int = 3, threads: int = 1) -> None:
    """Print both times, and check that all starts write the same."""
    wall: dict[str, list[float]] = {"first": [], "second": []}
    processor: dict[str, list[float]] = {"first": [], "second": []}
    answers = set()
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as caches:
            for start in wall:
                seconds, used, answer = _score(caches, threads)
                wall[start].append(seconds)
                processor[start].append(used)
                answers.add(answer)
    rows = [
        [start, median_and_spread(wall[start]), median_and_spread(processor[start])] for start in ("first", "second")
    ]
    ratios = [later / first for first, later in zip(wall["first"], wall["second"], strict=True)]
    holds = max(ratios) <= MOST_OF_FIRST and len(answers) == 1
    print_table(
        "moepass score demo, one text (s)",
        ["start", "wall", "processors"],
        rows,
        f"second / first {median_and_spread(ratios)}; at most {MOST_OF_FIRST}, with equal answers: {verdict(holds)}",
    )
    if not holds:
        raise typer.Exit(1)


def _score(caches: str, threads: int) -> tuple[float, float, str]:
    """Wall seconds, processor seconds and output of one start that keeps its caches in the folder `caches`."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
    environment.pop("MOEPASS_CACHE_DIR", None)
    words = [sys.executable, "-c", COMMAND, "score", "demo", "--threads", str(threads)]
    before, started = os.times(), time.perf_counter()
    result = subprocess.run(words, input=TEXT, capture_output=True, text=True, check=True, env=environment)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used, result.stdout


if __name__ == "__main__":
    typer.run(main)
