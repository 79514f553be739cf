"""Compare predictions with measurements, for one graph and the sizes of its last runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moepass.passes.ir.planner_decisions import Decisions
from moepass.runtime.execute.run_clock import MeasuredRuns

NOT_MEASURED = "not measured"
# torch counts memory by process and device, not by graph.
_PEAK = "the most since the process began: loading, compiling and other models on the device are part of it"


@dataclasses.dataclass(frozen=True)
class ReportedFigure:
    """A number that the planner predicted and a run measured.

    Attributes:
        name: the measured quantity.
        unit: "s" or "B".
        predicted: the prediction; None with the reason in `predicted_by`.
        measured: the measurement; None with the reason in `note`.
        predicted_by: the source of the prediction.
        note: further work that the measurement includes.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    predicted_by: str
    note: str

    @property
    def off(self) -> float | None:
        """The relative error of the prediction: a fraction of the measured value, None if there is no such value."""
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
    """Predicted and measured values of the last runs of one graph. `str` prints one line for each.

    Attributes:
        decisions: the planner's decisions for the sizes of these runs.
        runs: how many runs were measured.
        step: seconds of one run.
        exposed: seconds that a run waits for banks.
        weights: bytes of the graph's inputs on the device.
        slots: bytes of the ring.
        activations: bytes of intermediate values.
        peak: bytes that were allocated on the device at once.
    """

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
        """All figures, in the order in which they are printed."""
        return (self.step, self.exposed, self.weights, self.slots, self.activations, self.peak)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        decisions, resident = self.decisions, len(self.decisions.resident_layers)
        tokens = "an unknown number of tokens"
        if decisions.tokens:
            tokens = f"{decisions.batch} x {decisions.sequence} tokens"
        yield f"{self.runs} runs of {tokens}, {decisions.slots} slots, {resident} layers resident"
        yield f"machine: {decisions.profile or 'no hardware profile'}"
        yield from map(str, self.figures)


def run_report(decisions: Decisions, measured: MeasuredRuns) -> RunReport:
    """Return the report of the runs that were `measured`, for `decisions` made for their sizes."""
    memory = decisions.memory
    seconds_by, bytes_by = decisions.source("step_seconds"), decisions.source("memory")
    no_run = f"{NOT_MEASURED}: no run yet behind the first one"
    not_counted = f"{NOT_MEASURED}: torch does not count what is allocated on a CPU"

    def seconds(name: str, predicted: float | None, value: float | None) -> ReportedFigure:
        return ReportedFigure(name, "s", predicted, value, seconds_by, "" if value is not None else no_run)

    def nbytes(name: str, predicted: float | None, value: int | None, note: str, missing: str) -> ReportedFigure:
        return ReportedFigure(name, "B", predicted, value, bytes_by, missing if value is None else note)

    weights, slots, peak = measured.weight_bytes, measured.slot_bytes, measured.peak_bytes
    activations = None if peak is None or weights is None or slots is None else peak - weights - slots
    return RunReport(
        decisions,
        measured.runs,
        seconds("step", decisions.step_seconds, measured.run_seconds),
        seconds("exposed", decisions.exposed_seconds, measured.exposed_seconds),
        nbytes("weights and shards", None if memory is None else memory.resident_bytes, weights, "", no_run),
        nbytes("slots", None if memory is None else memory.slot_bytes, slots, "", no_run),
        nbytes("activations", None if memory is None else memory.activation_bytes, activations, _PEAK, not_counted),
        nbytes("peak", None if memory is None else memory.peak_bytes, peak, _PEAK, not_counted),
    )
