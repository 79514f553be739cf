"""Durations of a graph's runs and their waits for banks, and a comparison with what the planner predicted.

Runs are always measured, at little cost. On a CPU the clock is read twice per run. On CUDA two events are recorded on
the compute stream, and the host does not wait for them. The ring reports a run's waits, so other models do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moepass.passes.ir.planner_decisions import Decisions
from moepass.runtime.transfer.copier import Wait
from moepass.runtime.transfer.recording import Moment, moment_on, seconds_between
from moepass.runtime.transfer.ring import Ring

NOT_MEASURED = "not measured"
# torch counts memory by process and device, not by graph.
_PEAK = "the most since the process began: loading, compiling and other models on the device are part of it"
# Medians and means are taken over the last runs, at most this number.
_COUNTED_RUNS = 32


@dataclasses.dataclass(frozen=True)
class MeasuredRuns:
    """Measurements of the last runs with equal input sizes, without the first: its slots are empty, its memory is new.

    Attributes:
        sizes: the input sizes of these runs by name; empty before the first run.
        run_seconds: median duration of the last 32 of them; None without runs.
        exposed_seconds: mean time that the last 32 of them waited for banks; None without runs.
        slot_bytes: bytes of the ring; None before the first run.
        weight_bytes: bytes of the graph's inputs on its device, without banks at rest; None before the first run.
        peak_bytes: peak of the memory that torch allocated on the device; None if torch does not track it.
    """

    sizes: Mapping[str, int]
    runs: int
    run_seconds: float | None
    exposed_seconds: float | None
    slot_bytes: int | None
    weight_bytes: int | None
    peak_bytes: int | None


class RunClock:
    """Times the runs of one graph on one device; `inputs_at_rest` are the positions of banks that rest elsewhere."""

    def __init__(self, inputs_at_rest: Collection[int] = ()) -> None:
        self._inputs_at_rest = inputs_at_rest
        self._device: torch.device | None = None
        self._weight_bytes: int | None = None
        self._lock = threading.Lock()
        self._restart({})

    def _restart(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._runs = 0
        # The moments at which each run began and ended, and its waits.
        self._spans: deque[tuple[tuple[Moment, Moment], Sequence[Wait]]] = deque(maxlen=_COUNTED_RUNS)
        self._slot_bytes: int | None = None

    @contextlib.contextmanager
    def run(
        self, device: torch.device, sizes: Mapping[str, int], ring: Ring | None, arguments: Sequence[Any] = ()
    ) -> Iterator[None]:
        """Time the code inside, a run with these input sizes. `ring` reports its waits. Ignores runs that raise."""
        with self._lock:
            if self._device is None:
                self._device, self._weight_bytes = device, self._count_weight_bytes(device, arguments)
            if sizes != self._sizes or not self._runs:
                self._restart(dict(sizes))
        started = moment_on(device)
        yield
        span = started, moment_on(device)
        with self._lock:
            if sizes != self._sizes:  # another thread has begun a run with other sizes
                return
            self._runs += 1
            self._slot_bytes = 0 if ring is None else ring.device_bytes
            if self._runs > 1:
                self._spans.append((span, () if ring is None else ring.waits))

    def _count_weight_bytes(self, device: torch.device, arguments: Sequence[Any]) -> int:
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for position, value in enumerate(arguments)
            if isinstance(value, torch.Tensor) and value.device == device and position not in self._inputs_at_rest
        }
        return sum(storages.values())

    def measured(self) -> MeasuredRuns:
        """Return the measurements so far. On CUDA this waits until these runs have finished."""
        peak_bytes = None
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
        with self._lock:
            run_seconds = [seconds_between(*span) for span, _ in self._spans]
            waited_seconds = [sum(wait() for wait in waits) for _, waits in self._spans]
            return MeasuredRuns(
                self._sizes,
                max(0, self._runs - 1),
                statistics.median(run_seconds) if run_seconds else None,
                statistics.fmean(waited_seconds) if waited_seconds else None,
                self._slot_bytes,
                self._weight_bytes,
                peak_bytes,
            )


@dataclasses.dataclass(frozen=True)
class ReportedFigure:
    """A number that the planner predicted and a run measured, in `unit` "s" or "B".

    `predicted_by` is the source of the prediction, or the reason why there is none. `note` names further work that the
    measurement includes, or the reason why there is none.
    """

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    predicted_by: str
    note: str

    @property
    def off(self) -> float | None:
        """The relative error of the prediction: a fraction of the measured value; None if a value is missing."""
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
        decisions, resident = self.decisions, len(self.decisions.resident_layers)
        tokens = f"{decisions.batch} x {decisions.sequence}" if decisions.tokens else "an unknown number of"
        runs = f"{self.runs} runs of {tokens} tokens, {decisions.slots} slots, {resident} layers resident"
        machine = f"machine: {decisions.profile or 'no hardware profile'}"
        return "\n".join([runs, machine, *map(str, self.figures)])


def run_report(decisions: Decisions, measured: MeasuredRuns) -> RunReport:
    """Return the report of the runs that were `measured`, for `decisions` made for their sizes."""
    seconds_by, bytes_by = decisions.source("step_seconds"), decisions.source("memory")
    no_run = f"{NOT_MEASURED}: no run yet behind the first one"
    not_counted = f"{NOT_MEASURED}: torch does not count what is allocated on a CPU"

    def seconds(name: str, predicted: float | None, value: float | None) -> ReportedFigure:
        return ReportedFigure(name, "s", predicted, value, seconds_by, "" if value is not None else no_run)

    def nbytes(name: str, field: str, value: int | None, note: str, missing: str) -> ReportedFigure:
        predicted = None if decisions.memory is None else getattr(decisions.memory, field)
        return ReportedFigure(name, "B", predicted, value, bytes_by, missing if value is None else note)

    weights, slots, peak = measured.weight_bytes, measured.slot_bytes, measured.peak_bytes
    activations = None if peak is None or weights is None or slots is None else peak - weights - slots
    return RunReport(
        decisions,
        measured.runs,
        seconds("step", decisions.step_seconds, measured.run_seconds),
        seconds("exposed", decisions.exposed_seconds, measured.exposed_seconds),
        nbytes("weights and shards", "resident_bytes", weights, "", no_run),
        nbytes("slots", "slot_bytes", slots, "", no_run),
        nbytes("activations", "activation_bytes", activations, _PEAK, not_counted),
        nbytes("peak", "peak_bytes", peak, _PEAK, not_counted),
    )
