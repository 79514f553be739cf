"""Part `streaming`: a whole model with resident experts, with streamed experts, and with Inductor and accelerate.

    resident    torch.compile(backend="asyncep"), all experts on the device
    streamed    the same, experts in pinned host memory, through a ring of slots
    inductor    torch.compile(backend="inductor"), all experts on the device
    accelerate  accelerate.cpu_offload, uncompiled, all weights in host memory

The variants share the weights that they keep on the device. Their logits are compared with those of the uncompiled
model before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import moepass
from benchmarks.on_gpu.expert_layers import relative_error
from benchmarks.on_gpu.kernel_runs import how_experts_run
from benchmarks.on_gpu.models import build_model, held_bytes, sharing_copy, token_ids
from benchmarks.on_gpu.tables import ResultTable
from benchmarks.on_gpu.target import (
    Deadline,
    Failures,
    Target,
    Timing,
    WrongResultError,
    conditions,
    is_out_of_memory,
)
from moepass.models.formulas.layers import model_flops
from moepass.models.sizes.architecture import short_dtype
from moepass.models.sizes.families import from_config
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.machine.times import fill_seconds
from moepass.passes.planner.model_problem import threshold, typical_bank
from moepass.passes.planner.strategies import Setting
from moepass.runtime.banks.banks import BankStore

RESIDENT, STREAMED, INDUCTOR, ACCELERATE = "resident", "streamed", "inductor", "accelerate"
SLOTS = 2
# Streaming counts as saturated from this fraction of the resident rate.
SATURATED = 0.95
# The tolerance relative to that of one product: errors of layers add up, and ties between experts may flip.
_DEPTH_FACTOR = 10


@dataclasses.dataclass(frozen=True)
class StreamingPoint:
    """One variant at one number of tokens. `bytes` counts weights, slots and the run on the device."""

    tokens: int
    variant: str
    timing: Timing
    mfu: float | None
    exposed_seconds: float | None
    bytes: int | None


@dataclasses.dataclass
class StreamingResult:
    """The points, and the `predicted` and `observed` threshold in tokens; None if unknown or never reached."""

    points: list[StreamingPoint] = dataclasses.field(default_factory=list)
    predicted: float | None = None
    observed: float | None = None
    missing: list[str] = dataclasses.field(default_factory=list)

    def point(self, tokens: int, variant: str) -> StreamingPoint | None:
        """Return the point of `variant` at `tokens`, or None if it was not measured."""
        return next((point for point in self.points if (point.tokens, point.variant) == (tokens, variant)), None)

    def rate_ratios(self, variant: str, other: str) -> dict[int, float]:
        """Return the speed of a variant relative to `other`, by number of tokens."""
        pairs = {
            point.tokens: (point, self.point(point.tokens, other)) for point in self.points if point.variant == variant
        }
        return {count: two.timing.seconds / first.timing.seconds for count, (first, two) in pairs.items() if two}


@dataclasses.dataclass(frozen=True)
class _Variant:
    """A variant of the model; `run(ids)` returns the logits of the last tokens."""

    name: str
    run: Callable[[torch.Tensor], torch.Tensor]
    model: nn.Module
    store: BankStore | None = None

    def waited(self, target: Target) -> float | None:
        """Return the seconds in which computation has waited for experts so far; None if it never does."""
        target.synchronize()
        return None if self.store is None else self.store.ring().statistics.waited_seconds

    def bytes(self, target: Target, ids: torch.Tensor) -> int | None:
        """Return the bytes on the device: weights, slots, and the peak that a run adds to them."""
        taken = target.memory_of(lambda: self.run(ids))
        if taken is None:
            return None
        return taken + held_bytes(self.model, target.device) + (0 if self.store is None else self.store.device_bytes)


def sequences_of(tokens: int, longest: int) -> tuple[int, int]:
    """Return the number of sequences, at least 2 so that one capture serves all, and their length."""
    count = max(2, -(-tokens // longest))
    return count, tokens // count


def crossing(ratios: Mapping[int, float], level: float) -> float | None:
    """Return the tokens from which `ratios` stay at `level`, interpolated over the logarithm of tokens."""
    counts = sorted(ratios)
    below = [count for count in counts if ratios[count] < level]
    if not counts or (below and below[-1] == counts[-1]):
        return None
    if not below:
        return float(counts[0])
    left = below[-1]
    right = counts[counts.index(left) + 1]
    fraction = (level - ratios[left]) / (ratios[right] - ratios[left])
    return left * (right / left) ** fraction


def predicted_threshold(target: Target, config: PreTrainedConfig, longest: int) -> float | None:
    """Return the tokens from which the profile's rates hide transfers, with the planner's margin, or None."""
    if target.hardware is None or target.hardware.host is None:
        return None
    architecture = from_config(config)
    # The threshold depends neither on the number of sequences nor on the budget.
    setting = Setting(architecture, target.hardware, Sequences(1, longest), short_dtype(target.dtype), math.inf)
    layer = architecture.typical_moe_layer
    transfer = fill_seconds(setting.hardware, typical_bank(setting), "host")
    return float(threshold(setting, layer, transfer).tokens)


@torch.no_grad()
def measure_streaming(
    target: Target,
    config: PreTrainedConfig,
    counts: Sequence[int],
    longest: int,
    rounds: int,
    deadline: Deadline,
    failures: Failures,
    folder: Path | None = None,
    *,
    times_accelerate: bool = True,
) -> StreamingResult:
    """Print one table for steps of `counts` tokens."""
    table = ResultTable(
        "streaming",
        f"Whole model ({config.model_type}, hidden {config.hidden_size}), {config.num_hidden_layers} layers, "
        f"{SLOTS} slots, {str(target.dtype).removeprefix('torch.')}",
        ["tokens", "sequences", "variant", "ms", "tokens/s", "of resident", "MFU", "exposed ms", "GiB"],
        conditions(target),
        folder,
    )
    result = StreamingResult(predicted=predicted_threshold(target, config, longest))
    torch._dynamo.reset()
    target.free_memory()
    model = build_model(config, target)
    ids = token_ids(config, *sequences_of(counts[0], longest), target.device)
    made, errors = _right_ones(model, _compiled_variants(model, target), ids, target, result, failures)
    measure = functools.partial(_measure, result, table, target, config, longest)
    for tokens in counts:
        if deadline.is_over:
            result.missing.append(f"{tokens} tokens: the part's {deadline.seconds:.0f} s were over")
            continue
        try:
            measure(made, tokens, rounds)
        except Exception as error:
            result.missing.append(f"{tokens} tokens: {failures.add(error)}")
    result.observed = crossing(result.rate_ratios(STREAMED, RESIDENT), SATURATED)
    try:
        if times_accelerate:
            _measure_accelerate(model, measure, target, counts, result, deadline)
    except Exception as error:
        result.missing.append(f"accelerate: {failures.add(error)}")
    table.finish(_note(result, errors, rounds))
    return result


def _compiled_variants(model: PreTrainedModel, target: Target) -> list[_Variant]:
    # Models of one class share their code, by which Dynamo limits compilations.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    streamed = sharing_copy(model)
    store = moepass.offload_experts(streamed, slots=SLOTS, device=target.device).store
    return [
        _Variant(RESIDENT, _logits_of(torch.compile(model, backend="asyncep")), model),
        _Variant(STREAMED, _logits_of(torch.compile(streamed, backend="asyncep")), streamed, store),
        _Variant(INDUCTOR, _logits_of(torch.compile(sharing_copy(model), backend="inductor")), model),
    ]


def _logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    return run


def _right_ones(
    model: PreTrainedModel,
    variants: Sequence[_Variant],
    ids: torch.Tensor,
    target: Target,
    result: StreamingResult,
    failures: Failures,
) -> tuple[list[_Variant], str]:
    """Return the variants whose logits match those of the uncompiled model, and a description of each difference.

    Streamed experts run the same kernels as resident ones, so their logits are compared with each other too.
    """
    plain = _logits_of(model)(ids).double()
    logits: dict[str, torch.Tensor] = {}
    right, reasons = [], []
    for variant in variants:
        try:
            with moepass.record_compilations() as compilations:
                outputs = variant.run(ids)
            off = relative_error(outputs.flatten(0, -2), plain.flatten(0, -2))
            how = f", experts by {how_experts_run(compilations)}" if compilations else ""
            reasons.append(f"{variant.name} {off:.1e}{how}")
            if not off <= _DEPTH_FACTOR * target.most_error:
                raise WrongResultError(f"the logits' relative error to the uncompiled model is {off:.2e}")
            logits[variant.name] = outputs
            if variant.name == STREAMED and RESIDENT in logits:
                apart = relative_error(outputs.flatten(0, -2), logits[RESIDENT].double().flatten(0, -2))
                reasons.append(f"streamed against resident {apart:.1e}")
                if not apart <= target.most_error:
                    raise WrongResultError(f"the logits' relative error to resident experts is {apart:.2e}")
            right.append(variant)
        except Exception as error:
            result.missing.append(f"{variant.name}: {failures.add(error)}")
    return right, "; ".join(reasons)


def _measure(
    result: StreamingResult,
    table: ResultTable,
    target: Target,
    config: PreTrainedConfig,
    longest: int,
    variants: Sequence[_Variant],
    tokens: int,
    rounds: int,
) -> None:
    count, length = sequences_of(tokens, longest)
    ids = token_ids(config, count, length, target.device)
    flops = float(model_flops(from_config(config), count, length))
    fitting: dict[str, tuple[_Variant, int | None]] = {}
    for variant in variants:
        try:
            fitting[variant.name] = variant, variant.bytes(target, ids)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            result.missing.append(f"{tokens} tokens, {variant.name}: out of memory")
        target.free_memory()
    waited = {name: variant.waited(target) for name, (variant, _) in fitting.items()}
    runs = {name: functools.partial(variant.run, ids) for name, (variant, _) in fitting.items()}
    timings = target.interleaved(runs, rounds, is_stream=True)
    for name, (variant, nbytes) in fitting.items():
        timing, peak = timings[name], target.peak_flops
        mfu = None if peak is None else flops / timing.seconds / peak
        before, after = waited[name], variant.waited(target)
        exposed = None if before is None or after is None else (after - before) / (2 * rounds + 1)
        point = StreamingPoint(tokens, name, timing, mfu, exposed, nbytes)
        result.points.append(point)
        resident = result.point(tokens, RESIDENT)
        table.add(
            *(tokens, f"{count} x {length}", name, timing, f"{tokens / timing.seconds:.0f}"),
            "-" if resident is None else f"{resident.timing.seconds / timing.seconds:.3f}",
            "-" if mfu is None else f"{mfu:.3f}",
            "-" if point.exposed_seconds is None else f"{point.exposed_seconds * 1e3:.2f}",
            "-" if nbytes is None else f"{nbytes / 2**30:.2f}",
        )


def _measure_accelerate(
    model: PreTrainedModel,
    measure: Callable[[Sequence[_Variant], int, int], None],
    target: Target,
    counts: Sequence[int],
    result: StreamingResult,
    deadline: Deadline,
) -> None:
    """Measure accelerate at few numbers of tokens, once each, because a step transfers all weights."""
    if importlib.util.find_spec("accelerate") is None:
        result.missing.append("accelerate: not installed")
        return
    from accelerate import cpu_offload

    above = [count for count in counts if result.predicted is not None and count >= result.predicted]
    wanted = dict.fromkeys([above[0] if above else counts[-1], counts[len(counts) // 2], counts[0]])
    offloaded = None
    for tokens in wanted:
        if deadline.is_over:
            result.missing.append(f"{tokens} tokens, accelerate: the part's {deadline.seconds:.0f} s were over")
            continue
        if offloaded is None:
            # accelerate's hooks write into the model, so it needs separate parameters.
            offloaded = sharing_copy(model)
            cpu_offload(offloaded, execution_device=target.device)
        measure([_Variant(ACCELERATE, _logits_of(offloaded), offloaded)], tokens, 1)


def _note(result: StreamingResult, errors: str, rounds: int) -> str:
    predicted = "none (no profile)" if result.predicted is None else f"{result.predicted:.0f} tokens"
    observed = "not reached" if result.observed is None else f"{result.observed:.0f} tokens"
    missing = f" Not measured: {'; '.join(result.missing)}." if result.missing else ""
    return (
        f"Saturation threshold: predicted {predicted}, observed {observed} (streamed at {SATURATED} of resident, "
        f"interpolated).{missing} Medians of {rounds} steps in turns (accelerate: one), ± half of the range. MFU: "
        "FLOPs of the model by models/formulas, against the stated bf16 peak. exposed: what computation waits for "
        "experts in a step, on average. GiB: weights and slots on the device, and the additional peak of a step. "
        f"Largest error of a row of logits against the uncompiled model, by norm: {errors}."
    )
