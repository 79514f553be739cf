"""The table of other projects' packages in `docs/expert-parallelism.md`, made from `docs/results/packages.json`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec

from tests.helpers.packages.package_cases import PackageRun

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "packages.json"
PAGE = ROOT / "docs" / "expert-parallelism.md"
BEGIN, END = "<!-- packages: made by tests/helpers/packages/record_packages.py -->\n", "<!-- end of packages -->\n"


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run with `version` of the package on the day `date`."""

    version: str
    date: str
    run: PackageRun


@dataclasses.dataclass(frozen=True)
class CaseResults:
    package: str
    dispatcher: str
    needs: tuple[str, ...]
    runs: tuple[RecordedRun, ...]

    @property
    def name(self) -> str:
        return f"{self.package}: {self.dispatcher}"


@dataclasses.dataclass(frozen=True)
class PackageResults:
    environment: str
    cases: tuple[CaseResults, ...]


def read_results() -> PackageResults:
    return msgspec.json.decode(RESULTS.read_bytes(), type=PackageResults)


def table(results: PackageResults) -> str:
    """Return the table as Markdown, with a sentence about its origin."""
    dates = sorted({run.date for case in results.cases for run in case.runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"Run on real ranks ({results.environment}; {when}), against the same layer uncompiled:",
        "",
        "| package | dispatcher | result | graphs | needs | run on | largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(case) for case in results.cases]
    return "\n".join(lines) + "\n"


def _row(case: CaseResults) -> str:
    runs = [recorded.run for recorded in case.runs]
    outcomes: dict[str, list[str]] = {}
    for run in runs:
        dtype, ranks, lower = run.settings.dtype, run.settings.ranks, run.settings.lower
        outcomes.setdefault(_outcome(run), []).append(f"{dtype} on {ranks} ranks, {lower}")
    if len(outcomes) == 1:
        result = next(iter(outcomes))
    else:
        result = "; ".join(f"{' and '.join(settings)}: {text}" for text, settings in outcomes.items())
    graphs = sorted({run.graphs for run in runs})
    where = sorted({f"{run.settings.ranks} ranks, {run.settings.lower}" for run in runs})
    ran = [run for run in runs if not run.error]
    worst = "; ".join(
        f"{dtype} {max(differences):.1e}"
        for dtype in dict.fromkeys(run.settings.dtype for run in ran)
        if (differences := [run.difference for run in ran if run.settings.dtype == dtype])
    )
    needs = "; ".join(f"`{need}`" if need.startswith("torch") else need for need in case.needs)
    cells = (
        *(
            f"{case.package} {' and '.join(dict.fromkeys(recorded.version for recorded in case.runs))}",
            case.dispatcher,
            result,
        ),
        *(" or ".join(map(str, graphs)) if ran else "none", needs or "nothing", "; ".join(where), worst or "none"),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(run: PackageRun) -> str:
    if run.error:
        return f"**not compiled**: {run.error}"
    if run.is_taken:
        left = [f"{number} {kind}" for kind, number in run.exchanges.items()]
        left += [f"{run.waits} host syncs"] * bool(run.waits)
        return f"**rewritten** ({', '.join(run.forms)})" + f"; remaining: {', '.join(left)}" * bool(left)
    reason = run.refusals[0] if run.refusals else "the graph breaks between the exchanges and the experts"
    # Graphs with constant and with symbolic numbers of tokens have separate refusals.
    verdict = (
        f"**rewritten in part** ({', '.join(run.forms)}), the other graphs refused" if run.forms else "**refused**"
    )
    return f"{verdict}: {re.sub(r'; its collectives stay$', '', reason)}"


def write_page() -> None:
    """Write the table between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, remaining = text.split(BEGIN)
    _, after = remaining.split(END)
    PAGE.write_text(before + BEGIN + "\n" + table(read_results()) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    write_page()
