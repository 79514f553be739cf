"""Send ten times as many requests as a server can answer: measure goodput, the latency of refusals, and memory.

    python -m benchmarks.serving.overload [--seconds 60] [--times 10]

`moepass serve demo` runs with one rank. Its capacity is the rate of clients that send their next request as soon as
they are answered. Then requests are sent at TIMES that rate, at random times, independent of earlier answers, from a
separate process. Both phases alternate, so that drift of the machine affects both. Requests are four prompts of 400
uncached tokens.

Passes if goodput is within 10 % of the capacity, 99 of 100 refusals take less than 50 ms for their client, and the
server and the rank do not grow. The client shares the cores; the table shows how late it sends.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import typer

from benchmarks.serving.served import ServedProcess, served_process
from benchmarks.serving.shared import print_table, verdict

CLIENTS = 16
TURNS = 5
QUEUE_SECONDS = 5.0
LEAST_GOODPUT, MOST_REFUSAL_SECONDS, MOST_GROWTH = 0.9, 0.05, 0.1
MEGABYTE = 1 << 20


@dataclasses.dataclass
class Phase:
    """The results of one kind of load, its seconds, and the cores that server and rank used."""

    found: dict[str, Any]
    cores: list[float]

    @property
    def answered_per_s(self) -> float:
        """Return the answered requests per second."""
        return float(self.found["answered_per_s"])


def phase(served: ServedProcess, seconds: float, kind: str, number: float) -> Phase:
    """Run a load of `kind` in a separate process, and return its results."""
    words = [sys.executable, "-m", "benchmarks.serving.open_loop", str(served.port), str(seconds), kind, str(number)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began, before = time.monotonic(), processor_seconds(served)
        result: dict[str, Any] = json.loads(process.stdout.readline())
        wall = time.monotonic() - began
    return Phase(result, [(late - early) / wall for early, late in zip(before, processor_seconds(served), strict=True)])


class MemoryWatch:
    """A thread that samples the memory of the server and of its ranks every half second."""

    def __init__(self, served: ServedProcess) -> None:
        self.samples: list[tuple[int, int]] = []
        self._served, self._ends = served, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(0.5):
            ranks = sum(rank.memory_info().rss for rank in self._served.ranks().values())
            self.samples.append((self._served.process.memory_info().rss, ranks))

    def end(self) -> list[tuple[int, int]]:
        """Stop sampling, and return the samples."""
        self._ends.set()
        self._thread.join()
        return self.samples


def processor_seconds(served: ServedProcess) -> list[float]:
    """Return the processor seconds of the server, and of its ranks."""
    times = [[served.process.cpu_times()], [rank.cpu_times() for rank in served.ranks().values()]]
    return [sum(usage.user + usage.system for usage in group) for group in times]


def percentile(values: list[float], part: float) -> float:
    """Return the value below which the fraction `part` of `values` lies; NaN for no values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main(seconds: float = 60.0, times: float = 10.0) -> None:
    """Alternate phases of capacity and overload at TIMES the capacity, for SECONDS in total."""
    arguments = ["demo", "--eager", "--threads", "1", "--queue-seconds", str(QUEUE_SECONDS), "--kv-cache", "off"]
    environment = {**os.environ, "MOEPASS_CACHE_DIR": ""}
    with tempfile.TemporaryFile() as log, served_process(arguments, environment, log) as served:
        phase(served, 5.0, "closed", CLIENTS)  # warm up code, allocations, and the server's estimate of its rate
        closed, opened, memory = [phase(served, seconds / TURNS / 2, "closed", CLIENTS)], [], MemoryWatch(served)
        for _ in range(TURNS):
            opened.append(phase(served, seconds / TURNS, "open", times * closed[-1].answered_per_s))
            closed.append(phase(served, seconds / TURNS / 2, "closed", CLIENTS))
        samples = memory.end()
        metrics = served.metrics()
        status = served.end()
    if not report(closed, opened, samples, metrics, status, f"{times:g} times the capacity for {seconds:g} s"):
        raise typer.Exit(1)


def report(
    closed: list[Phase],
    opened: list[Phase],
    samples: list[tuple[int, int]],
    metrics: dict[str, float],
    status: int,
    title: str,
) -> bool:
    """Print the table, and return True if all targets are met."""
    capacities = [phase.answered_per_s for phase in closed]
    parts = [2 * phase.answered_per_s / (capacities[turn] + capacities[turn + 1]) for turn, phase in enumerate(opened)]
    by_status: dict[int, list[float]] = collections.defaultdict(list)
    errors: collections.Counter[str] = collections.Counter()
    for one in opened:
        errors += collections.Counter(one.found["errors"])
        for name, values in one.found["seconds_by_status"].items():
            by_status[int(name)] += values
    errors += collections.Counter({str(name): len(by_status[name]) for name in by_status if name not in (200, 429)})
    late = [value for phase in opened for value in phase.found["late"]]
    early_bytes, late_bytes = samples[len(samples) // 4], samples[-max(1, len(samples) // 20)]
    goodput, refused = statistics.median(parts), percentile(by_status[429], 0.99)

    def milliseconds(values: list[float], *wanted: float) -> str:
        return ", ".join(f"{1000 * percentile(values, fraction):.1f}" for fraction in wanted)

    def cores(phases: list[Phase], which: int) -> str:
        return f"{statistics.mean(phase.cores[which] for phase in phases):.2f}"

    def per_core(phases: list[Phase]) -> str:
        return f"{statistics.mean(phase.answered_per_s for phase in phases) / float(cores(phases, 1)):.1f}"

    rows: list[tuple[str, Any]] = [
        (
            "capacity, alternating with the overload (requests/s)",
            ", ".join(f"{capacity:.1f}" for capacity in capacities),
        ),
        (
            "sent (requests/s)",
            ", ".join(f"{len(phase.found['late']) / phase.found['seconds']:.0f}" for phase in opened),
        ),
        ("goodput (requests/s)", ", ".join(f"{phase.answered_per_s:.1f}" for phase in opened)),
        ("goodput as a fraction of the capacity before and after it", ", ".join(f"{share:.2f}" for share in parts)),
        ("goodput, median", f"{goodput:.3f}"),
        ("answered, refused with 429, other", f"{len(by_status[200])}, {len(by_status[429])}, {dict(errors) or 0}"),
        ("refusals: median, 99 %, longest ms", milliseconds(by_status[429], 0.5, 0.99, 1)),
        ("answers: median, 99 % ms", milliseconds(by_status[200], 0.5, 0.99)),
        ("the client sends late by: median, 99 % ms", milliseconds(late, 0.5, 0.99)),
        ("answers per second of the rank's processor, the same", f"{per_core(closed)}, {per_core(opened)}"),
        ("cores of the rank, at capacity and in overload", f"{cores(closed, 1)}, {cores(opened, 1)}"),
        ("cores of the server, at capacity and in overload", f"{cores(closed, 0)}, {cores(opened, 0)}"),
        ("cores of the client in overload", f"{statistics.mean(phase.found['cores'] for phase in opened):.2f}"),
        *(
            (f"MB of the {name}, after a quarter and at the end", f"{first / MEGABYTE:.0f}, {last / MEGABYTE:.0f}")
            for name, first, last in zip(("server", "rank"), early_bytes, late_bytes, strict=True)
        ),
        ("compilations after ready", f"{metrics['compilations_after_ready']:g}"),
        ("exit status after SIGTERM", status),
    ]
    holds = {
        "goodput within 10 % of the capacity": goodput >= LEAST_GOODPUT,
        "99 of 100 refusals within 50 ms": refused < MOST_REFUSAL_SECONDS,
        "memory flat": all(
            last <= first * (1 + MOST_GROWTH) for first, last in zip(early_bytes, late_bytes, strict=True)
        ),
        "nothing but answers and refusals": not errors and status == 0,
    }
    rows += [(name, verdict(is_held)) for name, is_held in holds.items()]
    print_table(f"Overload: {title}, moepass serve demo, 1 rank", ["", "measured"], rows)
    return all(holds.values())


if __name__ == "__main__":
    typer.run(main)
