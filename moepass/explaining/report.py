"""The report of `moepass explain`: its data, schema `moepass.explain/1` (docs/explain.md), and its four forms.

`explain_model.py` makes a report. JSON, text, page and trace show the same figures.
"""

from __future__ import annotations

import html
import re
from importlib import resources

import msgspec

from moepass.explaining.compiler_view import Explanation
from moepass.explaining.report_text import host_memory_text, report_text, serving_text, source_text, stored_text
from moepass.passes.ir.planner_decisions import Decisions
from moepass.passes.ir.timeline import Event, Timeline, chrome_trace
from moepass.runtime.serving.engine.step_engine import StepForm

REPORT_SCHEMA = "moepass.explain/1"


class ReportPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in a report, which refuses unknown fields."""


class ModelPart(ReportPart, frozen=True):
    """The sizes of the model. Those of experts are of the typical MoE layer, and 0 without one."""

    name: str
    model_type: str
    layers: int
    moe_layers: int
    hidden: int
    experts: int
    top_k: int
    moe_intermediate: int
    dtype: str
    parameters: int
    expert_bytes: int
    other_bytes: int


class StoredPart(ReportPart, frozen=True):
    """A quantised checkpoint, and a forecast that computes from its stored weights.

    Attributes:
        format: the format of the experts.
        expert_bytes: bytes of the experts as stored.
        other_bytes: bytes of all other weights as stored.
        bank_link_bytes: bytes of a bank on the link.
        bank_slot_bytes: bytes of a bank in a slot. They differ if kernels compute in another dtype.
        computes_in: the dtype of the kernels.
        runs_as: the dtype or format that moepass runs today, and to which the other parts of the report refer.
        home: the best home of the forecast.
        asyncep_step_seconds: None if asyncep does not fit.
        fastest_other: the fastest other strategy that fits, or None.
    """

    format: str
    expert_bytes: int
    other_bytes: int
    bank_link_bytes: int
    bank_slot_bytes: int
    computes_in: str
    runs_as: str
    home: str
    asyncep_step_seconds: float | None
    asyncep_memory_bytes: float
    fastest_other: str | None
    fastest_other_step_seconds: float | None


class HardwarePart(ReportPart, frozen=True):
    """Figures of one device.

    Attributes:
        flops: the peak rate for the model's dtype, per second.
        peer_bytes_per_s: the rate of the peer link in one direction, or None. The same holds for `host_bytes_per_s`.
        source: the sources of the figures.
    """

    name: str
    ranks: int
    flops: float
    peer_bytes_per_s: float | None
    host_bytes_per_s: float | None
    hbm_bytes: float
    hbm_bytes_per_s: float
    source: str


class WorkloadPart(ReportPart, frozen=True):
    """The work of one rank in one step."""

    batch: int
    seq: int
    tokens: int


class HomeTried(ReportPart, frozen=True):
    """A home that was considered.

    Attributes:
        step_seconds: None if asyncep does not fit or cannot use the home.
        note: the reason for that, or empty.
    """

    home: str
    step_seconds: float | None
    peak_bytes: float | None
    fits: bool
    note: str


class StrategyPart(ReportPart, frozen=True):
    """The chosen strategy.

    Attributes:
        chosen: its name.
        runner_up: the next strategy that fits, or None.
        home: where asyncep keeps its experts.
        crossover_tokens: tokens per rank from which asyncep beats AllToAll; None if it never does, and on one device.
    """

    chosen: str
    reason: str
    runner_up: str | None
    home: str
    homes_tried: tuple[HomeTried, ...]
    memory_budget_bytes: float
    crossover_tokens: int | None


class Block(ReportPart, frozen=True):
    """An MoE block. `by_analogy` is True if its layer was not captured but an equal layer was."""

    name: str
    form: str
    rewritten: bool
    refusal: str | None
    bank_bytes: int
    by_analogy: bool


class SaturationPart(ReportPart, frozen=True):
    """The saturation threshold of the typical MoE layer. `values` has the values of the symbols in `formula`."""

    gather_bytes: float
    gather_seconds: float
    flops_per_token: float
    tokens_per_rank: int
    tokens_per_rank_at_peak: int
    flops_per_rank: float
    gamma: float
    formula: str
    values: dict[str, float]


class SchedulePart(ReportPart, frozen=True):
    """The steady state of one step of `strategy`, which is asyncep, or resident if that was chosen."""

    strategy: str
    slots: int
    distance: int
    resident_layers: tuple[int, ...]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    least_step_seconds: float
    mfu: float
    timeline: tuple[Event, ...]


class MemoryPart(ReportPart, frozen=True):
    """Bytes on one device for the strategy of `schedule`. Nothing is decoded, so `kv_bytes` is 0.

    Attributes:
        host_bytes: host memory that all ranks of the machine need. It includes device memory if they compute on a CPU.
        host_limit_bytes: host memory of the machine; None if it is unknown.
        host_fits: None if the limit is unknown.
    """

    strategy: str
    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float
    peak_bytes: float
    budget_bytes: float
    fits: bool
    host_bytes: float = 0.0
    host_limit_bytes: float | None = None
    host_fits: bool | None = None


class ComparisonRow(ReportPart, frozen=True):
    """A strategy. `step_seconds` is for the sequences of all ranks, and None if asyncep does not fit."""

    strategy: str
    step_seconds: float | None
    comm_bytes_per_layer: float
    memory_bytes: float
    fits: bool
    background_bytes_per_layer: float = 0.0


class CurveRow(ReportPart, frozen=True):
    """The planned schedule for another number of tokens, ignoring the memory budget."""

    tokens_per_rank: int
    step_seconds: float
    exposed_seconds: float
    all_to_all_seconds: float


class MemoryCurveRow(ReportPart, frozen=True):
    """The threshold with `resident_layers` banks on the device and two slots, and the bytes that they need there."""

    resident_layers: int
    memory_bytes: float
    tokens_per_rank: int


class CompilerPart(ReportPart, frozen=True):
    """The result of capture and compilation up to lowering.

    Attributes:
        captured_layers: the number of captured layers.
        is_cut: True if the model has more layers, whose blocks are equal to captured ones.
        explanation: the plans.
        trie_refusal: why a server cannot compute shared prefixes of these layers once, or None.
    """

    captured_layers: int
    is_cut: bool
    explanation: Explanation
    trie_refusal: str | None

    @property
    def captured_text(self) -> str:
        """The captured layers, described for people."""
        return "the first layer" if self.captured_layers == 1 else f"the first {self.captured_layers} layers"


class ServingPart(ReportPart, frozen=True):
    """The form in which `moepass serve` computes steps of the model.

    Attributes:
        form: tries or padded rows; None if the model cannot be served.
        reason: why steps are not tries, or None.
    """

    form: StepForm | None
    reason: str | None


class Report(ReportPart, frozen=True, kw_only=True):
    """A report that can be converted to JSON, text, HTML and a trace.

    Attributes:
        saturation: None if no figures are known; `assumptions` has the reason. The same holds for `memory`.
        schedule: also None if asyncep does not fit.
        stored: None if the checkpoint is not quantised.
        plan: the planner's decisions, as every compiled plan has them. `schedule` and `memory` are derived from it.
    """

    schema: str
    version: str
    model: ModelPart
    hardware: HardwarePart
    workload: WorkloadPart
    strategy: StrategyPart
    blocks: tuple[Block, ...]
    saturation: SaturationPart | None = None
    schedule: SchedulePart | None = None
    memory: MemoryPart | None = None
    comparison: tuple[ComparisonRow, ...] = ()
    curve: tuple[CurveRow, ...] = ()
    memory_curve: tuple[MemoryCurveRow, ...] = ()
    refusals: tuple[str, ...]
    advice: tuple[str, ...] = ()
    assumptions: tuple[str, ...]
    sources: dict[str, str]
    compiler: CompilerPart
    serving: ServingPart
    how_to_run: str = ""
    stored: StoredPart | None = None
    plan: Decisions | None = None

    @property
    def verdict(self) -> str:
        """The name of the chosen strategy, or "nothing fits"."""
        unfit = any(row.strategy == self.strategy.chosen and not row.fits for row in self.comparison)
        return "nothing fits" if unfit else self.strategy.chosen

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """Read a report. Raises msgspec.ValidationError if `text` is not a report of this schema."""
        report = msgspec.json.decode(text, type=Report)
        if report.schema != REPORT_SCHEMA:
            raise msgspec.ValidationError(f"schema is {report.schema!r}, this version reads {REPORT_SCHEMA!r}")
        return report

    def text(self, width: int = 80, every_row: bool = False) -> str:
        """Return the report for a terminal, without colours. `every_row` adds the schedule of the captured graphs."""
        return report_text(self, width, every_row)

    def html(self) -> str:
        """Return the report as one HTML page, which a browser opens from the file, without a server or a network.

        It is `data/report.html` with the report inserted, as JSON for the page's script and as texts.
        """
        page = (resources.files("moepass.explaining") / "data/report.html").read_text(encoding="utf-8")
        # The JSON must not end its script element in the HTML, so less-than signs are escaped.
        json = msgspec.json.encode(self).decode().replace("<", "\\u003c")
        texts = {
            "@@TITLE@@": f"{self.model.name} on {self.hardware.name}",
            "@@CHECKPOINT@@": stored_text(self),
            "@@HOST_MEMORY@@": host_memory_text(self),
            "@@SERVING@@": serving_text(self),
            "@@SOURCES@@": source_text(self),
        }
        # One pass over the page, because the texts may contain marks.
        insertions = {mark: html.escape(text, quote=False) for mark, text in texts.items()} | {"@@REPORT@@": json}
        return re.sub("|".join(insertions), lambda match: insertions[match[0]], page)

    def trace(self) -> str:
        """Return the timeline for ui.perfetto.dev. Raises ValueError if nothing was scheduled."""
        if self.schedule is None:
            raise ValueError("the report has no timeline, because nothing was scheduled")
        timeline = Timeline(self.schedule.timeline, "derived")
        return chrome_trace({f"{self.model.name} on {self.hardware.name}, {self.schedule.strategy}": timeline})

    def __repr__(self) -> str:
        return f"<moepass report: {self.model.name} on {self.hardware.name}: {self.strategy.chosen}>"
