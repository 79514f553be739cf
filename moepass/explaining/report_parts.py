"""The report that `moepass explain` gives: schema `moepass.explain/1`, which docs/explain.md describes.

Pure data. `explain_model.py` makes one; text, page and trace are made from it, so that all show the same numbers.
"""

from __future__ import annotations

import msgspec

from moepass.explaining.compiler_view import Explanation
from moepass.passes.ir.decisions import Decisions
from moepass.passes.ir.timeline import Event
from moepass.runtime.serving.engine.step_engine import StepForm

REPORT_SCHEMA = "moepass.explain/1"


class ReportPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ModelPart(ReportPart, frozen=True):
    """Sizes; those of experts are of the typical layer with experts, and 0 where there is none."""

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
    """A quantised checkpoint: bytes of its experts and of all else, and a forecast that computes from them.

    A bank travels as it is stored and may take more in a slot, where kernels `computes_in` another dtype. `runs_as` is
    what the other parts of the report are of: what moepass runs. `asyncep_step_seconds` is None where it does not fit,
    `fastest_other` where no other strategy does.
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
    """Figures of one device: `flops` is the peak rate per second for the model's dtype; links are in one direction."""

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
    """A home that was considered. `step_seconds` is None where it does not fit or cannot be; `note` says why."""

    home: str
    step_seconds: float | None
    peak_bytes: float | None
    fits: bool
    note: str


class StrategyPart(ReportPart, frozen=True):
    """The verdict. `home` is where asyncep keeps its experts; `crossover_tokens` per rank: from there on it beats the
    AllToAll form (None: never, or on one device)."""

    chosen: str
    reason: str
    runner_up: str | None
    home: str
    homes_tried: tuple[HomeTried, ...]
    memory_budget_bytes: float
    crossover_tokens: int | None


class Block(ReportPart, frozen=True):
    """A block of experts. `by_analogy`: its layer was not captured, but one of the same kind was."""

    name: str
    form: str
    rewritten: bool
    refusal: str | None
    bank_bytes: int
    by_analogy: bool


class SaturationPart(ReportPart, frozen=True):
    """The threshold of the typical layer with experts; `values` are those of the symbols in `formula`."""

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
    """The steady state of one step. `strategy` says whose: asyncep, or resident where that was chosen."""

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
    """Bytes on one device, of the strategy that `schedule` names. Nothing is decoded, so `kv_bytes` is 0.

    `host_bytes` are those of host memory on the machine of all ranks, of `host_limit_bytes` (None: not known); where
    the machine computes on its CPU, devices included. `host_fits` is None where that is not known.
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
    """`step_seconds` for the sequences of all ranks; None where asyncep does not fit at all."""

    strategy: str
    step_seconds: float | None
    comm_bytes_per_layer: float
    memory_bytes: float
    fits: bool
    background_bytes_per_layer: float = 0.0


class CurveRow(ReportPart, frozen=True):
    """The planned schedule for another number of tokens, memory left out of account."""

    tokens_per_rank: int
    step_seconds: float
    exposed_seconds: float
    all_to_all_seconds: float


class MemoryCurveRow(ReportPart, frozen=True):
    """The threshold with that many banks at rest beside two slots, and the bytes that this takes on one device."""

    resident_layers: int
    memory_bytes: float
    tokens_per_rank: int


class CompilerPart(ReportPart, frozen=True):
    """Capture and compilation up to lowering, of `captured_layers` layers of the model; the rest is by analogy.

    `trie_refusal` is why a server cannot compute shared prefixes of these layers once, or None.
    """

    captured_layers: int
    is_cut: bool
    explanation: Explanation
    trie_refusal: str | None

    @property
    def captured_text(self) -> str:
        return "the first layer" if self.captured_layers == 1 else f"the first {self.captured_layers} layers"


class ServingPart(ReportPart, frozen=True):
    """How `moepass serve` computes steps of the model: as tries, or as padded rows. None: it cannot serve the model.

    `reason` says why it is not a trie, and is None for one.
    """

    form: StepForm | None
    reason: str | None


class ReportContent(ReportPart, frozen=True):
    """`saturation`, `schedule` and `memory` are None where there is nothing to forecast; `assumptions` says why.

    `schedule` is also None where asyncep does not fit. `plan` is what the planner decided, as every compiled plan
    carries it: what `schedule` and `memory` show was read off it. `stored` is None where the checkpoint is not
    quantised.
    """

    schema: str
    version: str
    model: ModelPart
    hardware: HardwarePart
    workload: WorkloadPart
    strategy: StrategyPart
    blocks: tuple[Block, ...]
    saturation: SaturationPart | None
    schedule: SchedulePart | None
    memory: MemoryPart | None
    comparison: tuple[ComparisonRow, ...]
    curve: tuple[CurveRow, ...]
    memory_curve: tuple[MemoryCurveRow, ...]
    refusals: tuple[str, ...]
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]
    sources: dict[str, str]
    compiler: CompilerPart
    serving: ServingPart
    how_to_run: str = ""
    stored: StoredPart | None = None
    plan: Decisions | None = None

    @property
    def verdict(self) -> str:
        """The chosen strategy in a word, or that nothing fits."""
        unfit = any(row.strategy == self.strategy.chosen and not row.fits for row in self.comparison)
        return "nothing fits" if unfit else self.strategy.chosen
