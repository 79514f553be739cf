"""`moepass explain`: the compiler's result for a model and the figures of its plan on a machine, in one report.

No weights are loaded and nothing is computed. Figures come from the sizes of the model
(`passes/planner/forecast.py`). Blocks and refusals come from the plans of a graph that is captured on the meta device.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from moepass.explaining import arguments
from moepass.explaining import report_parts as parts
from moepass.explaining.compiler_part import compiler_part, explained_blocks
from moepass.explaining.forecasts import (
    advice,
    best_home,
    how_to_run,
    packed_tokens,
    stored_assumption,
    stored_part,
    why_nothing_fits,
)
from moepass.explaining.report import Report
from moepass.models.formulas.layers import flops_per_token, model_parameters
from moepass.models.homes import home_named
from moepass.models.sizes.architecture import short_dtype
from moepass.models.sizes.weight_formats import EXPERTS
from moepass.models.version import __version__
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT, Decisions
from moepass.passes.machine.hardware import Hardware
from moepass.passes.machine.layer_times import Sequences, sequences_of
from moepass.passes.machine.times import decode_seconds, gather_seconds, peak_flops_per_s
from moepass.passes.planner.forecast import Forecast, crossover_tokens, curve_point, forecast, threshold_curve
from moepass.passes.planner.make_plan import MOST_SLOTS as USEFUL_SLOTS
from moepass.passes.planner.strategies import MICRO_BATCH_TOKENS, Setting, StrategyCost, banks_bytes

DEFAULT_HARDWARE = "8xh100-80g"
DEFAULT_BATCH, DEFAULT_SEQ = 16, 4096
# The number of points on the curve for each doubling of the tokens.
_POINTS_PER_OCTAVE = 2


def explain(
    model: Any,
    *,
    hardware: str | os.PathLike[str] | Hardware = DEFAULT_HARDWARE,
    ranks: int | None = None,
    home: str | None = None,
    dtype: str | None = None,
    batch: int = DEFAULT_BATCH,
    seq: int = DEFAULT_SEQ,
    tokens: int | None = None,
    memory_budget_bytes: float | None = None,
    slots: int | None = None,
    lower: str = "inductor",
) -> Report:
    """Plan `model` on `hardware`, and report its speed and memory with the reasons: see docs/explain.md.

    Args:
        model: the name of a preset, a checkpoint folder, a config.json, a transformers configuration, or a
            transformers model, compiled or not.
        hardware: a preset such as 8xh100-80g, the file of a profile, or a profile.
        ranks: the number of devices, if it differs from the profile's.
        home: where experts rest: device, peer, host, hybrid or disk. None chooses the fastest that fits: of peer,
            hybrid and host with several ranks, else host.
        dtype: the dtype of the weights, bf16, fp8 or fp32, instead of the configuration's dtype.
        batch: sequences per rank and step.
        seq: tokens of each sequence.
        tokens: one sequence of this many tokens, instead of `batch` and `seq`.
        memory_budget_bytes: the bytes to use on each device, by default 0.9 of its memory.
        slots: the largest number of slots of the ring, by default as many as shorten the step, up to 4.
        lower: how segments would be compiled, "inductor", "eager" or "tensorrt".

    Raises:
        InputError: for an unknown model, machine, home or dtype, for a link or rate that the machine lacks, or for a
            number that is out of range.
        CheckpointError: for a folder or config from which no model can be built.
    """
    arguments.check_numbers(batch, seq, tokens, slots, ranks)
    batch, seq = (1, tokens) if tokens is not None else (batch, seq)
    if home is not None:
        home_named(home)
    if dtype is not None:
        dtype = short_dtype(dtype)
    model_sizes = arguments.explained_model(model, dtype)
    machine = arguments.machine_of(hardware, ranks)
    budget = arguments.memory_budget(machine, memory_budget_bytes)
    workload = parts.WorkloadPart(batch, seq, batch * seq)
    assumptions = [
        "routing is even over the experts, and every rank has equally many tokens",
        "no text is generated, so no keys and values are kept",
        "only asyncep overlaps communication with computation",
    ]
    if hardware == DEFAULT_HARDWARE:
        assumptions.append(f"hardware {DEFAULT_HARDWARE} (the default)")
    if memory_budget_bytes is None:
        assumptions.append(f"memory budget {arguments.DEFAULT_MEMORY_SHARE} of each device's memory (the default)")
    architecture = model_sizes.architecture
    if architecture is None:
        compiler = compiler_part(model_sizes, 2 if slots is None else slots, lower)
        return _report_without_figures(model_sizes, machine, workload, budget, compiler, assumptions)

    stored = architecture.stored
    if stored is not None and stored.name != dtype:
        # Experts rest and travel as stored, and all other weights are decoded while the model is loaded.
        stored = dataclasses.replace(stored, parts=(EXPERTS,)) if EXPERTS in stored.parts else None
    setting = Setting(architecture, machine, Sequences(batch, seq), architecture.dtype, budget, stored=stored)
    most_slots = USEFUL_SLOTS if slots is None else slots
    best, tried = best_home(setting, home, most_slots)
    shown = forecast(setting, "device") if best.chosen == RESIDENT and best.home != "device" else best
    compiler = compiler_part(model_sizes, min(shown.schedule.slots if shown.schedule else 2, most_slots) or 2, lower)
    if compiler.is_cut:
        assumptions.append(
            f"captured: {compiler.captured_text} of {len(architecture.layers)}, with every kind of layer; "
            "blocks of the other layers are inferred from equal ones"
        )
    if text := stored_assumption(setting, architecture.unknown_storage):
        assumptions.append(text)
    if setting.dtype == "fp8":
        assumptions.append(
            "fp8 is only a forecast: moepass computes only experts in fp8, not attention and dense layers"
        )
    blocks, refusals = explained_blocks(compiler, architecture, setting.dtype, stored)
    crossover = crossover_tokens(best)
    strategy = parts.StrategyPart(best.chosen, best.reason, best.runner_up, best.home, tuple(tried), budget, crossover)
    schedule = _schedule_part(shown)
    checkpoint = os.fsdecode(model) if isinstance(model, (str, os.PathLike)) and os.path.isdir(model) else None
    return Report(
        schema=parts.REPORT_SCHEMA,
        version=__version__,
        model=_model_part(setting),
        hardware=_hardware_part(machine, setting.dtype),
        workload=workload,
        strategy=strategy,
        blocks=blocks,
        saturation=_saturation_part(best),
        schedule=schedule,
        memory=_memory_part(shown),
        comparison=tuple(_comparison_row(cost) for cost in best.comparison),
        curve=_curve(best),
        memory_curve=tuple(
            parts.MemoryCurveRow(at.resident_layers, at.memory_bytes, at.tokens) for at in threshold_curve(best)
        ),
        refusals=refusals,
        advice=advice(best, crossover, refusals),
        assumptions=tuple(assumptions),
        sources=_sources(model_sizes, machine),
        compiler=compiler,
        serving=parts.ServingPart("trie" if compiler.trie_refusal is None else "rows", compiler.trie_refusal),
        plan=_plan(shown, crossover),
        how_to_run=how_to_run(
            strategy, schedule, checkpoint, why_nothing_fits(best), setting.dtype, machine.device_kind
        ),
        stored=stored_part(best, home, most_slots),
    )


def _report_without_figures(
    model_sizes: arguments.ExplainedModel,
    machine: Hardware,
    workload: parts.WorkloadPart,
    budget: float,
    compiler: parts.CompilerPart,
    assumptions: list[str],
) -> Report:
    """Return a report with only the compiler's part, for a model without experts or without size formulas."""
    import torch

    explanation = compiler.explanation
    blocks, refusals = explained_blocks(compiler, None, "")
    plan = explanation.plans[0]
    first = next((block for graph_plan in explanation.plans for block in graph_plan.blocks), None)
    text: Any = model_sizes.config.get_text_config()
    dtype = str(model_sizes.config.dtype).removeprefix("torch.")
    return Report(
        schema=parts.REPORT_SCHEMA,
        version=__version__,
        model=parts.ModelPart(
            name=model_sizes.name,
            model_type=explanation.model_type,
            layers=int(text.num_hidden_layers),
            moe_layers=explanation.expert_layers,
            hidden=int(text.hidden_size),
            experts=first.experts if first else 0,
            top_k=(first.top_k or 0) if first else 0,
            moe_intermediate=first.intermediate if first else 0,
            dtype=dtype,
            parameters=(explanation.expert_bytes + explanation.other_bytes) // getattr(torch, dtype).itemsize,
            expert_bytes=explanation.expert_bytes,
            other_bytes=explanation.other_bytes,
        ),
        hardware=_hardware_part(machine, None),
        workload=workload,
        strategy=parts.StrategyPart(plan.strategy, plan.reason, None, "host", (), budget, None),
        blocks=blocks,
        refusals=refusals,
        assumptions=(*assumptions, f"no figures: {model_sizes.unknown}"),
        sources=_sources(model_sizes, machine),
        compiler=compiler,
        # A server admits requests by their FLOPs, so it cannot serve a model with unknown sizes.
        serving=parts.ServingPart(None, model_sizes.unknown.partition(";")[0]),
    )


# ---- Parts of the report ---------------------------------------------------------------------------------------------


def _model_part(setting: Setting) -> parts.ModelPart:
    architecture = setting.architecture
    experts = architecture.typical_moe_layer.experts
    assert experts is not None
    return parts.ModelPart(
        name=architecture.name,
        model_type=architecture.model_type,
        layers=len(architecture.layers),
        moe_layers=len(architecture.moe_layers),
        hidden=architecture.hidden,
        experts=experts.count,
        top_k=experts.top_k,
        moe_intermediate=experts.width,
        dtype=architecture.dtype,
        parameters=model_parameters(architecture),
        expert_bytes=banks_bytes(setting),
        other_bytes=setting.dense_bytes,
    )


def _hardware_part(machine: Hardware, dtype: str | None) -> parts.HardwarePart:
    rate = peak_flops_per_s(machine, dtype) if dtype else next(iter(machine.flops.values()))
    links = [link.bytes_per_s for link in (machine.peer, machine.host) if link is not None]
    figures = [rate, machine.memory_bytes, machine.memory_bytes_per_s, *links]
    dates = [machine.conditions.date] if machine.conditions is not None else []
    return parts.HardwarePart(
        name=machine.name,
        ranks=machine.ranks,
        flops=rate.value,
        peer_bytes_per_s=machine.peer.bytes_per_s.value if machine.peer else None,
        host_bytes_per_s=machine.host.bytes_per_s.value if machine.host else None,
        hbm_bytes=machine.memory_bytes.value,
        hbm_bytes_per_s=machine.memory_bytes_per_s.value,
        source=", ".join([*sorted({figure.source for figure in figures}), *dates]),
    )


def _saturation_part(made: Forecast) -> parts.SaturationPart:
    architecture = made.setting.architecture
    layer = architecture.typical_moe_layer
    assert layer.experts is not None
    reached, bank = made.saturation, made.setting.bank(layer.experts)
    hardware, streams = made.setting.hardware, made.fill_seconds > 0
    return parts.SaturationPart(
        gather_bytes=bank.link_bytes,
        gather_seconds=gather_seconds(hardware, bank.link_bytes, made.home, made.setting.transport) if streams else 0.0,
        decode_seconds=decode_seconds(hardware, bank) if streams else 0.0,
        flops_per_token=flops_per_token(layer, architecture.hidden),
        tokens_per_rank=reached.tokens,
        tokens_per_rank_at_peak=made.at_peak.tokens,
        flops_per_rank=reached.flops,
        gamma=reached.values["gamma"],
        formula=reached.formula,
        values=reached.values,
        packed_tokens_per_rank=packed_tokens(made),
    )


def _schedule_part(made: Forecast) -> parts.SchedulePart | None:
    if made.schedule is None or made.simulation is None or made.mfu is None or not made.cost(ASYNCEP).fits:
        return None
    assert made.decisions is not None
    run = made.simulation
    return parts.SchedulePart(
        strategy=_strategy(made),
        slots=made.decisions.slots,
        distance=made.schedule.distance,
        resident_layers=made.decisions.resident_layers,
        step_seconds=run.step_seconds,
        compute_seconds=run.compute_seconds,
        exposed_seconds=run.exposed_seconds,
        least_step_seconds=run.bounds.step_seconds,
        mfu=made.mfu,
        timeline=run.timeline.events,
    )


def _plan(made: Forecast, crossover: int | None) -> Decisions | None:
    """Return the planner's decisions, with AllToAll below `crossover` tokens per rank if ranks can exchange tokens."""
    if made.decisions is None or made.setting.ranks == 1 or not made.decisions.streamed_layers:
        return made.decisions
    return made.decisions.exchanged_below(crossover)


def _memory_part(made: Forecast) -> parts.MemoryPart:
    return parts.MemoryPart(
        strategy=_strategy(made),
        resident_bytes=made.memory.resident_bytes,
        slot_bytes=made.memory.slot_bytes,
        activation_bytes=made.memory.activation_bytes,
        kv_bytes=made.memory.kv_bytes,
        peak_bytes=made.memory.peak_bytes,
        budget_bytes=made.setting.budget_bytes,
        fits=made.cost(ASYNCEP).fits,
        host_bytes=made.host.needed_bytes,
        host_limit_bytes=made.host.available_bytes,
        host_fits=made.host.fits,
    )


def _comparison_row(cost: StrategyCost) -> parts.ComparisonRow:
    step = cost.step_seconds if math.isfinite(cost.step_seconds) else None
    row = (cost.strategy, step, cost.communication_bytes, cost.memory_bytes, cost.fits, cost.background_bytes)
    return parts.ComparisonRow(*row)


def _strategy(made: Forecast) -> str:
    return RESIDENT if made.home == "device" else ASYNCEP


def _curve(made: Forecast) -> tuple[parts.CurveRow, ...]:
    """Return the curve from well below the threshold and the planned tokens to well above both."""
    marks = [made.saturation.tokens, made.setting.sequences.tokens, 1]
    octaves = range(
        _POINTS_PER_OCTAVE * max(0, math.floor(math.log2(min(mark for mark in marks[:2] if mark > 0))) - 4),
        _POINTS_PER_OCTAVE * (math.ceil(math.log2(max(marks))) + 2) + 1,
    )
    exact = [made.setting.sequences.tokens, *[made.saturation.tokens] * (made.saturation.tokens > 0)]
    wanted = {round(2 ** (step / _POINTS_PER_OCTAVE)) for step in octaves} | set(exact)
    # A step has whole sequences, so several numbers of tokens may give the same step.
    counts = sorted({sequences_of(count, made.setting.sequences.length).tokens for count in wanted})
    return tuple(parts.CurveRow(*dataclasses.astuple(curve_point(made, count))) for count in counts)


def _sources(model_sizes: arguments.ExplainedModel, machine: Hardware) -> dict[str, str]:
    """Return the source of every figure: for parts of the report, and for each figure of the machine."""
    return {
        "model": model_sizes.source,
        **{f"hardware.{name}": source for name, source in machine.sources().items()},
        "blocks": "derived: the result of the passes for the graph captured on the meta device",
        "saturation": "derived: the saturation threshold for the reached rate and the peak rate",
        "schedule": "derived: a discrete-event simulation of the steady state",
        "memory": "derived: formulas of weights, banks and activations; allocators round up",
        "comparison": "derived: layer times and collectives; bytes by the table of arXiv 2605.02960",
        "comparison.micro_batch_tokens": f"empirical: {MICRO_BATCH_TOKENS} tokens, as serving engines schedule at once",
        "curve": "derived: the planned schedule simulated for other numbers of tokens",
    }
