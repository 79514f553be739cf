"""Predicted beside measured, for one graph and the sizes of its last runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moepass.passes.ir.decisions import Decisions
from moepass.runtime.execute.run_clock import MeasuredRuns

NOT_MEASURED = "not measured"
# torch counts for the process and the device, not for a graph.
_PEAK = "the most since the process began: loading, compiling and other models on the device are part of it"


@dataclasses.dataclass(frozen=True)
class ReportedFigure:
    """A number as the planner predicts it and as it was measured; None with the reason in `predicted_by` or `note`.

    `note` also says what a measured number includes beside the run.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    predicted_by: str
    note: str

    @property
    def off(self) -> float | None:
        """Relative error of the prediction, as a fraction of the measured value."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1

    def __str__(self) -> str:
        predicted = self._text(self.predicted, self.predicted_by)
        off = "" if self.off is None else f", {self.off:+.1%} off"
        included = f" ({self.note})" if self.note and self.measured is not None else ""
        measured = self._text(self.measured, self.note)
        return f"{self.name}: predicted {predicted}, measured {measured}{off}{included}"

    def _text(self, value: float | None, reason: str) -> str:
        if value is None:
            return f"- ({reason})"
        return f"{value:.4g} s" if self.unit == "s" else f"{value / 1e6:.4g} MB"


@dataclasses.dataclass(frozen=True)
class RunReport:
    """`decisions` are those for the sizes of the last runs; `runs` of these were measured."""

    decisions: Decisions
    runs: int
    step: ReportedFigure
    exposed: ReportedFigure
    weights: ReportedFigure
    slots: ReportedFigure
    activations: ReportedFigure
    peak: ReportedFigure

    @property
    def figures(self) -> tuple[ReportedFigure, ...]:
        return (self.step, self.exposed, self.weights, self.slots, self.activations, self.peak)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        made = self.decisions
        tokens = f"{made.batch} x {made.sequence} tokens" if made.tokens else "an unknown number of tokens"
        yield f"{self.runs} runs of {tokens}, {made.slots} slots, {len(made.resident_layers)} layers resident"
        yield f"machine: {made.profile or 'no hardware profile'}"
        yield from map(str, self.figures)


def run_report(
    decisions: Decisions, measured: MeasuredRuns, weight_bytes: int | None, peak_bytes: int | None
) -> RunReport:
    """Put both side by side.

    `weight_bytes` are those of the graph's inputs on the device, banks at rest left out; None before there was a run.
    `peak_bytes` is the most memory that was allocated on the device; None: nothing tells.
    """
    memory = decisions.memory
    seconds_by, bytes_by = decisions.source("step_seconds"), decisions.source("memory")
    waiting = f"{NOT_MEASURED}: no run yet behind the first one"
    untold = f"{NOT_MEASURED}: torch does not count what is allocated on a CPU"

    def seconds(name: str, predicted: float | None, taken: float | None) -> ReportedFigure:
        return ReportedFigure(name, "s", predicted, taken, seconds_by, "" if taken is not None else waiting)

    def held(name: str, predicted: float | None, taken: int | None, missing: str = waiting) -> ReportedFigure:
        is_peak = taken is not None and missing == untold
        note = _PEAK if is_peak else "" if taken is not None else missing
        return ReportedFigure(name, "B", predicted, taken, bytes_by, note)

    weights, slots = weight_bytes, measured.slot_bytes
    known = None if peak_bytes is None or weights is None or slots is None else peak_bytes - weights - slots
    return RunReport(
        decisions,
        measured.runs,
        seconds("step", decisions.step_seconds, measured.run_seconds),
        seconds("exposed", decisions.exposed_seconds, measured.exposed_seconds),
        held("weights and shards", None if memory is None else memory.resident_bytes, weights),
        held("slots", None if memory is None else memory.slot_bytes, slots),
        held("activations", None if memory is None else memory.activation_bytes, known, untold),
        held("peak", None if memory is None else memory.peak_bytes, peak_bytes, untold),
    )
