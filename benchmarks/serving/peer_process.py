"""Run another engine in a separate process that stays alive: it receives prompts, and returns its time and answers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.serving.serving_workloads import Prompts


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one run over all prompts.

    `seconds` is the wall time. Each prompt has its most likely next token with its log-probability, and its latency.
    `processor_seconds` counts all threads of all processes involved. `flops_saved` is the fraction of the FLOPs of all
    requests, each alone, that was not computed; NaN if the engine does not count it.
    """

    seconds: float
    tokens: list[int]
    log_probabilities: list[float]
    latencies: list[float] = dataclasses.field(default_factory=list)
    processor_seconds: float = 0.0
    flops_saved: float = math.nan


def processor_seconds(process: int) -> float:
    """Return the processor seconds of `process` and its children so far."""
    root = psutil.Process(process)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(usage.user + usage.system for usage in times)


class Peer:
    """Runs `script` by `python`. A line of JSON goes in for each run and one comes out; its errors go to our own."""

    def __init__(self, python: str, script: str, *arguments: object) -> None:
        command = [python, str(Path(__file__).with_name(script)), *map(str, arguments)]
        environment = dict(os.environ)
        if python != sys.executable:  # another interpreter has its own packages
            environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()  # the process prints a line when it is ready

    def ask(self, prompts: Prompts, **options: object) -> Run:
        """Send all prompts, and return the results."""
        assert self._process.stdin is not None
        before = processor_seconds(self._process.pid)
        self._process.stdin.write(json.dumps({"prompts": prompts, **options}) + "\n")
        self._process.stdin.flush()
        run = Run(**self._line())  # type: ignore[arg-type]
        return dataclasses.replace(run, processor_seconds=processor_seconds(self._process.pid) - before)

    def close(self) -> None:
        """Close the input of the process, and wait until it ends."""
        self._process.communicate()

    def _line(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended; see its output")
        result: dict[str, object] = json.loads(line)
        return result
