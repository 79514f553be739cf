"""Ten times as many requests as a server can answer: goodput, how fast refusals are, and memory.

    python benchmarks/load/overload.py [--seconds 60] [--times 10]

`moepass serve demo` with one rank. Its capacity is what clients get that ask again as soon as they are answered, before
and after the overload. Then requests come at TIMES that rate, at random times, whatever becomes of those before them,
from a process of its own. Requests are four prompts of 400 tokens that no cache has.

Holds if goodput is within 10 % of the capacity, 99 of 100 refusals take less than 50 ms as their client sees it, and
the server and the rank do not grow. How late the client sends (it shares the cores) is told beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import typer
from served import ServedProcess, served_process

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import print_table, verdict

CLIENTS = 16
QUEUE_SECONDS = 2.0
LEAST_GOODPUT, MOST_REFUSAL_SECONDS, MOST_GROWTH = 0.9, 0.05, 0.1
MEGABYTE = 1 << 20


def asked(served: ServedProcess, seconds: float, kind: str, number: float) -> dict[str, Any]:
    program = str(Path(__file__).with_name("open_loop.py"))
    words = [sys.executable, program, str(served.port), str(seconds), kind, str(number)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class MemoryWatch:
    """Bytes of the server and of its ranks together, every half second."""

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
        self._ends.set()
        self._thread.join()
        return self.samples


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main(seconds: float = 60.0, times: float = 10.0) -> None:
    arguments = ["demo", "--eager", "--threads", "1", "--queue-seconds", str(QUEUE_SECONDS), "--kv-cache", "off"]
    environment = {**os.environ, "MOEPASS_CACHE_DIR": ""}
    with tempfile.TemporaryFile() as log, served_process(arguments, environment, log) as served:
        asked(served, 5.0, "closed", CLIENTS)  # warm: code, allocations, the rate that the server reckons with
        before = asked(served, seconds / 4, "closed", CLIENTS)["answered_per_s"]
        memory = MemoryWatch(served)
        began = time.monotonic()
        found = asked(served, seconds, "open", times * before)
        wall = time.monotonic() - began
        samples = memory.end()
        after = asked(served, seconds / 4, "closed", CLIENTS)["answered_per_s"]
        metrics = served.metrics()
        status = served.end()
    capacity = (before + after) / 2
    by_status = {int(name): values for name, values in found["seconds_by_status"].items()}
    refusals, goodput = by_status.get(429, []), found["answered_per_s"]
    others = {name: len(values) for name, values in by_status.items() if name not in (200, 429)} | found["errors"]
    early, late = samples[len(samples) // 4], samples[-len(samples) // 20 or -1]
    is_flat = all(last <= first * (1 + MOST_GROWTH) for first, last in zip(early, late, strict=True))
    sent = sum(map(len, by_status.values()))
    rows: list[tuple[str, Any]] = [
        ("capacity before, after (requests/s)", f"{before:.1f}, {after:.1f}"),
        ("offered (requests/s)", f"{sent / seconds:.0f}"),
        ("goodput (requests/s; part of the capacity)", f"{goodput:.1f}; {goodput / capacity:.3f}"),
        ("refused with 429", len(refusals)),
        ("other than 200 and 429", sum(others.values()) and str(others)),
        (
            "refusals: median, 99 %, longest ms",
            ", ".join(f"{1000 * percentile(refusals, part):.1f}" for part in (0.5, 0.99, 1)),
        ),
        (
            "answers: median, 99 % s",
            ", ".join(f"{percentile(by_status.get(200, []), part):.2f}" for part in (0.5, 0.99)),
        ),
        (
            "client sends late by: median, 99 % ms",
            ", ".join(f"{1000 * percentile(found['late'], part):.1f}" for part in (0.5, 0.99)),
        ),
        *(
            (f"MB of the {name}, after a quarter and at the end", f"{first / MEGABYTE:.0f} to {last / MEGABYTE:.0f}")
            for name, first, last in zip(("server", "rank"), early, late, strict=True)
        ),
        ("compilations after ready", f"{metrics['compilations_after_ready']:g}"),
        ("exit status after SIGTERM", status),
    ]
    holds = {
        "goodput": goodput >= LEAST_GOODPUT * capacity,
        "refusals": percentile(refusals, 0.99) < MOST_REFUSAL_SECONDS,
        "memory": is_flat,
        "nothing else": not sum(others.values()) and status == 0 and wall < seconds + 30,
    }
    rows.append(("goodput within 10 %, refusals under 50 ms, memory flat", verdict(all(holds.values()))))
    print_table(
        f"Overload: {times:g} times the capacity for {seconds:g} s, moepass serve demo, 1 rank", ["", "measured"], rows
    )
    if not all(holds.values()):
        print([name for name, is_held in holds.items() if not is_held], file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
