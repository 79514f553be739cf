"""Results of checks: a line of JSON and a line of text for each, written when the check ends."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


class NotRunError(Exception):
    """A check cannot run on this machine; the message says why."""


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The verdict on one check, and what it found."""

    part: str
    what: str
    verdict: str
    found: str
    seconds: float

    def text(self) -> str:
        """Return the result as one line."""
        return f"{self.verdict:7}  {self.part}, {self.what}: {self.found} ({self.seconds:.1f} s)"


class ResultFiles:
    """`acceptance.jsonl` and `acceptance.txt` in a folder. Several processes may append to them, one at a time."""

    def __init__(self, folder: Path, echo: TextIO) -> None:
        self.folder, self._echo = folder, echo
        self._json, self._text = folder / "acceptance.jsonl", folder / "acceptance.txt"

    def clear(self) -> None:
        """Create the folder, and remove the results of an earlier run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self._json, self._text):
            path.unlink(missing_ok=True)

    def add(self, result: CheckResult) -> None:
        """Write and print a result."""
        for path, line in ((self._json, json.dumps(dataclasses.asdict(result))), (self._text, result.text())):
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        print(result.text(), file=self._echo, flush=True)

    def read(self) -> list[CheckResult]:
        """Return all results that were written since `clear`."""
        if not self._json.exists():
            return []
        return [CheckResult(**json.loads(line)) for line in self._json.read_text(encoding="utf-8").splitlines()]


class PartChecks:
    """Runs the checks of one part and writes their results. A check that fails does not stop those after it."""

    def __init__(self, part: str, results: ResultFiles) -> None:
        self._part, self._results = part, results
        self._started = time.perf_counter()

    def run(self, what: str, check: Callable[[], str]) -> None:
        """Run `check`, which returns what it found, or raises NotRunError or any error."""
        started = time.perf_counter()
        try:
            found = check()
        except Exception as error:
            self._add_error(what, error, started)
        else:
            self._results.add(CheckResult(self._part, what, PASSED, found, time.perf_counter() - started))

    def run_part(self, part: Callable[[], object]) -> None:
        """Run `part`, which calls `run`, and write an error that is raised outside of its checks."""
        try:
            part()
        except Exception as error:
            self._add_error("before or between checks", error, self._started)

    def _add_error(self, what: str, error: Exception, started: float) -> None:
        verdict, found = NOT_RUN, str(error)
        if not isinstance(error, NotRunError):
            traceback.print_exception(error)
            verdict, found = FAILED, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self._results.add(CheckResult(self._part, what, verdict, found, time.perf_counter() - started))
