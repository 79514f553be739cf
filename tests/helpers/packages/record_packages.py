"""Run the layers of other projects, and write down what became of them.

`make record-packages` writes `docs/results/packages.json`, which `make test-packages` holds its runs against, and the
table of `docs/expert-parallelism.md`, which is made of it.
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
    """Record the cases with these names in them, or all, and write after each run; other runs are kept."""
    found = {one.name: one for one in read_results().cases} if RESULTS.exists() else {}
    wanted = [case for case in CASES if not names or any(name in case.name for name in names)]
    for of_all in itertools.zip_longest(*map(settings_of, wanted)):
        for case, settings in zip(wanted, of_all, strict=True):
            if settings is not None:
                before = found[case.name].runs if case.name in found else ()
                kept = [one for one in before if one.run.settings != settings]
                runs = {one.run.settings: one for one in (*kept, record(case, settings))}
                in_order = tuple(runs[one] for one in settings_of(case) if one in runs)
                found[case.name] = CaseResults(case.package, case.dispatcher, case.needs, in_order)
                cases = tuple(found[one.name] for one in CASES if one.name in found)
                results = PackageResults(f"torch {torch.__version__}, gloo, CPU", cases)
                RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
                write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
