"""Run the layers of other projects, and record the results.

`make record-packages` writes `docs/results/packages.json`, with which `make test-packages` compares its runs, and the
table in `docs/expert-parallelism.md`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import sys
import time

import msgspec
import torch

from tests.helpers.packages.package_cases import CASES, PackageCase, RunSettings, run_case, settings_of
from tests.helpers.packages.package_table import (
    RESULTS,
    CaseResults,
    PackageResults,
    RecordedRun,
    read_results,
    write_page,
)


def record(case: PackageCase, settings: RunSettings) -> RecordedRun:
    began = time.monotonic()
    run = run_case(case, settings)
    outcome = run.forms or run.error or run.refusals[:1]
    print(f"{case.name}, {settings}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    return RecordedRun(importlib.metadata.version(case.package), datetime.date.today().isoformat(), run)


def main(names: list[str]) -> None:
    """Record all cases, or those whose names contain one of `names`. Files are written after each run."""
    results_of = {recorded.name: recorded for recorded in read_results().cases} if RESULTS.exists() else {}
    wanted = [case for case in CASES if not names or any(name in case.name for name in names)]
    for of_all in itertools.zip_longest(*map(settings_of, wanted)):
        for case, settings in zip(wanted, of_all, strict=True):
            if settings is not None:
                before = results_of[case.name].runs if case.name in results_of else ()
                remaining = [recorded for recorded in before if recorded.run.settings != settings]
                runs = {recorded.run.settings: recorded for recorded in (*remaining, record(case, settings))}
                in_order = tuple(runs[possible] for possible in settings_of(case) if possible in runs)
                results_of[case.name] = CaseResults(case.package, case.dispatcher, case.needs, in_order)
                cases = tuple(results_of[known_case.name] for known_case in CASES if known_case.name in results_of)
                results = PackageResults(f"torch {torch.__version__}, gloo, CPU", cases)
                RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
                write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
