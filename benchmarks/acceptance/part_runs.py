"""Parts of the acceptance as processes, each with a time limit.

A part that is past its limit is ended with all processes that it has started; the results that it has written by then
remain. Then the next part runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from benchmarks.acceptance.results import FAILED, CheckResult, ResultFiles


@dataclasses.dataclass(frozen=True)
class Part:
    """A function "module:name" that runs checks, with the seconds that its process may take."""

    name: str
    limit_s: float
    function: str


def run_parts(parts: Sequence[Part], command: Callable[[Part], Sequence[str]], results: ResultFiles) -> None:
    """Run the command of each part. Its standard error goes to NAME.log in the folder of the results."""
    for part in parts:
        started = time.monotonic()
        log = results.folder / f"{part.name}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(command(part), stderr=errors, start_new_session=True)
            try:
                status = process.wait(part.limit_s)
                problem = f"its process ended with status {status}; see {log}" if status else ""
            except subprocess.TimeoutExpired:
                problem = f"ended after its limit of {part.limit_s:g} s; see {log}"
            finally:
                with contextlib.suppress(ProcessLookupError):  # all of its processes have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if problem:
            results.add(CheckResult(part.name, "process", FAILED, problem, time.monotonic() - started))
