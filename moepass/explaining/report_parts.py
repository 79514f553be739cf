"""The parts of a report: schema `moepass.explain/1`, which docs/explain.md describes."""

from __future__ import annotations

import msgspec

from moepass.explaining.compiler_view import Explanation
from moepass.passes.ir.timeline import Event
from moepass.runtime.serving.engine.step_engine import StepForm

REPORT_SCHEMA = "moepass.explain/1"


class ReportPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in a report, which refuses unknown fields."""


class ModelPart(ReportPart, frozen=True):
    """The sizes of the model. Expert sizes describe the typical MoE layer; they are 0 without one."""

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
    """A quantised checkpoint with its stored sizes, and a forecast for kernels that compute in the stored `format`.

    `runs_as` is the dtype that moepass computes in today, and that the rest of the report assumes.
    `decoded_tokens_per_rank` is the threshold if experts rested and travelled in that dtype. The other fields belong to
    the forecast: the bytes of a bank on the link and in a slot differ if kernels compute in another dtype,
    `computes_in`. `home` is the best home. `asyncep_step_seconds` is None if asyncep does not fit, and `fastest_other`
    if no other strategy fits.
    """

    format: str
    expert_bytes: int
    other_bytes: int
    bank_link_bytes: int
    bank_slot_bytes: int
    computes_in: str
    runs_as: str
    decoded_tokens_per_rank: int
    home: str
    asyncep_step_seconds: float | None
    asyncep_memory_bytes: float
    fastest_other: str | None
    fastest_other_step_seconds: float | None


class HardwarePart(ReportPart, frozen=True):
    """Figures of one device. `flops` is the peak rate for the model's dtype, per second.

    The rates of links are for one direction; they are None if the machine has no such link.
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
    """A home that was tried. `step_seconds` is None if asyncep does not fit or cannot use it, as `note` explains."""

    home: str
    step_seconds: float | None
    peak_bytes: float | None
    fits: bool
    note: str


class StrategyPart(ReportPart, frozen=True):
    """The chosen strategy, the next one that fits, or None, and the home of the experts with asyncep.

    `crossover_tokens` is the smallest number of tokens per rank at which asyncep beats AllToAll. It is None if asyncep
    never does, and on one device.
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
    """The saturation threshold of the typical MoE layer.

    A bank is on the link for `gather_seconds`, and is then decoded for `decode_seconds` (0 if it travels as it is in
    its slot) while the next bank is on the link, so the longer of the two must be hidden. `values` has the values of
    the symbols in `formula`. `packed_tokens_per_rank` is the threshold if `moepass pack` packed the experts; None if
    they are quantised or packed already, or do not travel.
    """

    gather_bytes: float
    gather_seconds: float
    flops_per_token: float
    tokens_per_rank: int
    tokens_per_rank_at_peak: int
    flops_per_rank: float
    gamma: float
    formula: str
    values: dict[str, float]
    # Reports that were written by earlier versions lack these.
    decode_seconds: float = 0.0
    packed_tokens_per_rank: int | None = None


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

    `host_bytes` is the host memory that all ranks of the machine need, including device memory if they compute on a
    CPU. `host_limit_bytes` is that of the machine; if it is unknown, it and `host_fits` are None.
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

    If `is_cut`, the model has more layers, whose blocks are equal to captured ones. `trie_refusal` is the reason why a
    server cannot compute shared prefixes of these layers once, or None.
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
    """The form in which `moepass serve` computes steps, None if it cannot, and the reason why it is not tries."""

    form: StepForm | None
    reason: str | None
