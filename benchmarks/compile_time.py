"""Measure compile time by depth, for whole-graph Inductor and for segments compiled once each, and the second start.

Every measurement is a fresh process with empty caches, except second starts, which find those of the first.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable

import torch
import typer

import moepass
from benchmarks.common import median_and_spread, print_table, reference_model, verdict

LIMIT = 0.33
# The fraction of the first start's time that the second may take.
MOST_OF_FIRST = 0.3
MOST_OF_FIRST_SERVE = 0.25
ONE_TEXT = '{"text": "hello world"}\n'
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
        without_moepass, resident, streaming = (_middle([turn[variant] for turn in results]) for variant in VARIANTS)
        ratio = streaming["seconds"] / without_moepass["seconds"]
        segments.add(int(streaming["segments"]))
        if depth == limit_at:
            holds = ratio <= LIMIT
        rows.append(
            [
                depth,
                f"{without_moepass['seconds']:.1f}",
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


@app.command()
def start(repeats: int = 3, threads: int = 1) -> None:
    """Measure a first and a second start of `moepass score demo --lower inductor` on one text, imports included.

    Each start is a separate process; the first one finds empty caches. The table shows wall time and processor time,
    which includes compilers and depends less on other programs. All starts must write the same output.
    """
    _two_starts(
        "moepass score demo --lower inductor, one text (s)",
        repeats,
        MOST_OF_FIRST,
        lambda caches: _score(caches, threads),
    )


@app.command()
def serve(model: str = "demo", home: str = "host", repeats: int = 3, threads: int = 1) -> None:
    """Measure the seconds until `moepass serve MODEL` is ready, for a first start with empty caches and a second."""
    _two_starts(
        f"moepass serve {model} --home {home}, until it is ready (s)",
        repeats,
        MOST_OF_FIRST_SERVE,
        lambda caches: _serve(caches, model, home, threads),
    )


def _two_starts(title: str, repeats: int, most: float, run: Callable[[str], tuple[float, float, str]]) -> None:
    """Measure two starts; `run` returns wall seconds, processor seconds and the output that all starts must share."""
    wall: dict[str, list[float]] = {"first": [], "second": []}
    processor: dict[str, list[float]] = {"first": [], "second": []}
    answers = set()
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as caches:
            for which in wall:
                seconds, used, answer = run(caches)
                wall[which].append(seconds)
                processor[which].append(used)
                answers.add(answer)
    rows = [
        [which, median_and_spread(wall[which]), median_and_spread(processor[which])] for which in ("first", "second")
    ]
    ratios, used_ratios = (
        [later / first for first, later in zip(seconds["first"], seconds["second"], strict=True)]
        for seconds in (wall, processor)
    )
    is_fast, is_equal = max(ratios) <= most, len(answers) == 1
    print_table(
        title,
        ["start", "wall", "processors"],
        rows,
        f"second / first {median_and_spread(ratios)}, of the processors' time {median_and_spread(used_ratios)}; "
        f"at most {most}: {verdict(is_fast)}; answers equal: {verdict(is_equal)}",
    )
    if not (is_fast and is_equal):
        raise typer.Exit(1)


@app.command(hidden=True)
def measure(variant: str, layers: int) -> None:
    """Compile one variant in this process, and print its seconds, error and segments as JSON."""
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
    """Return the median of each number over the turns."""
    return {name: statistics.median(measurement[name] for measurement in measured) for name in measured[0]}


def _in_fresh_process(variant: str, layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, "-m", "benchmarks.compile_time", "measure", variant, str(layers)]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def _score(caches: str, threads: int) -> tuple[float, float, str]:
    """Return wall seconds, processor seconds and output of one start that keeps its caches in the folder `caches`."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
    environment.pop("MOEPASS_CACHE_DIR", None)
    words = [sys.executable, "-m", "moepass.cli", "score", "demo", "--lower", "inductor", "--threads", str(threads)]
    before, started = os.times(), time.perf_counter()
    result = subprocess.run(words, input=ONE_TEXT, capture_output=True, text=True, check=True, env=environment)
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used, result.stdout


def _serve(caches: str, model: str, home: str, threads: int) -> tuple[float, float, str]:
    """Start a server that keeps its caches in the folder `caches`, and ask it once.

    Returns:
        The wall seconds until it is ready, the processor seconds of the server and its rank until they end, and the
        answer.
    """
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
    environment.pop("MOEPASS_CACHE_DIR", None)
    words = [sys.executable, "-m", "moepass.cli", "serve", model, "--home", home, "--port", "0"]
    before, started = os.times(), time.perf_counter()
    with subprocess.Popen(
        [*words, "--threads", str(threads)], stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        address = ""
        for line in server.stderr:
            if " at http" in line:
                address = line.split(" at ")[1].split(";")[0]
            if line.strip() == "ready":
                break
        else:
            raise RuntimeError("the server ended before it was ready")
        seconds = time.perf_counter() - started
        body = json.dumps({"model": model, "prompt": "one text", "max_tokens": 1, "logprobs": 3}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            logprobs = json.load(response)["choices"][0]["logprobs"]["top_logprobs"]
        server.send_signal(signal.SIGTERM)
        server.communicate()
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used, json.dumps(logprobs)


if __name__ == "__main__":
    app()
