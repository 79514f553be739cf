"""The planning problem of one captured graph, from its plan's banks and costs and the sizes of its inputs.

A graph that runs a complete model of known sizes is planned by the formulas of these sizes, because they know the
shapes of its GEMMs. Any other graph is planned by its costs: FLOPs at the reached rates, and at least its memory
traffic.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping

import torch

from moepass.models.errors import InputError
from moepass.models.formulas.stored_weights import BankSizes
from moepass.models.homes import COLLECTIVE
from moepass.models.sizes.architecture import short_dtype
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.planner_decisions import Decisions, DeviceMemory
from moepass.passes.ir.shards import slot_layout
from moepass.passes.machine.hardware import Hardware, with_ranks
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.machine.times import Work, decode_seconds, gather_seconds, peak_flops_per_s, work_seconds
from moepass.passes.planner.make_plan import NO_PROFILE, PlanningProblem, make_plan
from moepass.passes.planner.model_problem import execution_with_copies, model_problem, profile_of
from moepass.passes.planner.phases import LayerPhase
from moepass.passes.planner.simulate import ExecutionModel
from moepass.passes.planner.strategies import Setting, activations_bytes, peak_activation_bytes


def plan_graph(
    plan: Plan,
    sizes: Mapping[str, float],
    placed: PlacedModel | None = None,
    hardware: Hardware | None = None,
    transport: str = "pull",
    ranks: int = 1,
) -> Decisions:
    """Return the decisions by which a graph with this plan runs.

    A `placed` model provides the residents and slots that were decided when it was placed, and its profile. For other
    models, slots come from the plan and nothing stays.

    Args:
        plan: The plan of the graph.
        sizes: Values of the graph's symbols.
        placed: The model, if its experts were placed.
        hardware: The machine, for a model that was not placed.
        transport: How ranks exchange shards, for a model that was not placed.
        ranks: The number of devices, for a model that was not placed.

    Raises:
        InputError: The profile lacks a rate or a link.
    """
    problem = None if placed is None else _model_problem(plan, sizes, placed)
    if problem is None:
        machine = None if hardware is None else with_ranks(hardware, ranks)
        problem = _graph_problem(plan, sizes, placed, machine, transport)
    decisions = make_plan(problem).decisions
    if placed is not None:
        decided = {name: placed.decisions.source(name) for name in ("resident_layers", "slots")}
        decisions = dataclasses.replace(
            decisions,
            resident_layers=placed.decisions.resident_layers,
            memory_budget_bytes=placed.decisions.memory_budget_bytes,
            sources=tuple(sorted({**dict(decisions.sources), **decided}.items())),
        )
    if plan.dispatch is not None and plan.slot_stays:
        return decisions.exchanged_below(plan.dispatch.crossover_tokens)
    return decisions


def bank_phases(
    banks: Iterable[tuple[str, BankSizes]],
    numbers: Mapping[str, int],
    shard_bytes: Mapping[str, int] | None = None,
    read_in_place_bytes: Mapping[str, int] | None = None,
) -> tuple[LayerPhase, ...]:
    """Return phases of which only the banks are known.

    Args:
        banks: Names and sizes of the banks.
        numbers: The layer of each bank.
        shard_bytes: Bytes that each streamed bank keeps on the device.
        read_in_place_bytes: Bytes of the shard that are read in place, so that slots lack them.
    """
    shards, in_place = shard_bytes or {}, read_in_place_bytes or {}
    return tuple(
        LayerPhase(
            name,
            name,
            0.0,
            bank.slot_bytes,
            number=numbers[name],
            shard_bytes=shards.get(name, 0),
            read_in_place_bytes=in_place.get(name, 0),
            encoded_bytes=bank.encoded_bytes,
        )
        for name, bank in banks
    )


def layer_numbers(paths: Iterable[str]) -> dict[str, int]:
    """Return the layer number of each module path: the first number in the path, or its index if it has none."""
    numbers = {}
    for index, path in enumerate(paths):
        match = re.search(r"(?<![^.])\d+(?![^.])", path)
        numbers[path] = int(match[0]) if match else index
    return numbers


def _model_problem(plan: Plan, sizes: Mapping[str, float], placed: PlacedModel) -> PlanningProblem | None:
    """Pose the problem by the model's sizes; None if they are unknown or if the graph is not the complete model."""
    streamed = sorted(plan.bank(stay.bank).name for stay in plan.slot_stays)
    if placed.architecture is None or placed.hardware is None or streamed != sorted(name for name, _ in placed.banks):
        return None
    if not streamed and len(plan.blocks) < len(placed.architecture.moe_layers):
        return None  # the graph is a part of the model, or blocks were not recognised
    if any(bank.fp8 for bank in plan.banks):
        return None  # the sizes of the model have one dtype for attention and experts
    counts = plan.sequence_counts(sizes)
    if counts is None:
        return None
    budget = placed.decisions.memory_budget_bytes
    setting = Setting(
        placed.architecture,
        placed.hardware,
        Sequences(*counts),
        placed.dtype,
        math.inf if budget is None else budget,
        transport=placed.transport,
    )
    numbers = dict(placed.banks)
    streamed_banks = {numbers[bank.name]: bank for bank in plan.banks if bank.name in numbers}
    problem = model_problem(
        setting,
        placed.decisions.home,
        banks={number: bank.format for number, bank in streamed_banks.items() if bank.format.is_encoded},
        slots=plan.slots,
        resident_layers=placed.decisions.resident_layers,
        resting=dataclasses.replace(
            placed.weights, activation_bytes=_activation_bytes(plan, sizes, activations_bytes(setting))
        ),
    )
    # The graph shows which bytes its slots lack; the formula only knows which they can lack.
    in_place = {number: _read_in_place_bytes(bank) for number, bank in streamed_banks.items()}
    phases = (
        dataclasses.replace(phase, read_in_place_bytes=in_place.get(phase.number, 0)) if phase.bank_bytes else phase
        for phase in problem.phases
    )
    return dataclasses.replace(problem, phases=tuple(phases))


def _read_in_place_bytes(bank: BankSpec) -> int:
    return bank.format.slot_bytes - slot_layout(bank).nbytes


def _graph_problem(
    plan: Plan, sizes: Mapping[str, float], placed: PlacedModel | None, hardware: Hardware | None, transport: str
) -> PlanningProblem:
    """Pose the problem by the costs of the plan's steps."""
    if placed is not None:
        hardware, transport = placed.hardware, placed.transport
    home = plan.bank(plan.slot_stays[0].bank).home if plan.slot_stays else "device"
    names = [plan.bank(stay.bank).name for stay in plan.slot_stays]
    numbers = layer_numbers(names) if placed is None else {**layer_numbers(names), **dict(placed.banks)}
    batch, sequence = plan.sequence_counts(sizes) or (0, 0)
    unknown = NO_PROFILE if placed is None or not placed.unknown else placed.unknown
    phases: tuple[LayerPhase, ...] | None = None
    profile, machine = None, ExecutionModel(fills_ahead=transport != COLLECTIVE)
    if hardware is not None:
        phases, unknown, memory_share = _timed_phases(plan, sizes, hardware, home, transport, numbers)
        if phases is not None:
            formats = [plan.bank(stay.bank).format for stay in plan.slot_stays]
            largest = max(formats, key=lambda bank: bank.link_bytes, default=BankFormat.plain(0))
            machine = execution_with_copies(hardware, home, transport, largest, memory_share)
            profile = profile_of(hardware)
    if phases is None:
        stays = [plan.bank(stay.bank) for stay in plan.slot_stays]
        in_place = {bank.name: _read_in_place_bytes(bank) for bank in stays}
        phases = bank_phases([(bank.name, bank.format) for bank in stays], numbers, read_in_place_bytes=in_place)
    return PlanningProblem(
        phases=phases,
        home=home,
        resting=None if placed is None else _resting(plan, sizes, placed, batch * sequence),
        batch=batch,
        sequence=sequence,
        machine=machine,
        profile=profile,
        resident=(),
        slots=plan.slots,
        unknown=unknown,
        memory_source=memory_source(placed is not None and placed.architecture is not None and batch > 0),
    )


def _activation_bytes(plan: Plan, sizes: Mapping[str, float], by_formula: float) -> float:
    """Return the activation bytes according to the graph, or `by_formula` if they depend on data-dependent sizes."""
    try:
        return by_formula if plan.activations is None else plan.largest_activations(sizes)[0]
    except InputError:
        return by_formula


def _resting(plan: Plan, sizes: Mapping[str, float], placed: PlacedModel, tokens: int) -> DeviceMemory:
    """Return the device memory of the complete model without slots; other graphs of it may read the resident banks."""
    sizes_known = placed.architecture
    by_formula = 0.0 if sizes_known is None else peak_activation_bytes(sizes_known, tokens, placed.dtype)
    return dataclasses.replace(
        placed.weights,
        resident_bytes=placed.weights.resident_bytes + placed.bank_bytes,
        activation_bytes=_activation_bytes(plan, sizes, by_formula),
    )


def memory_source(knows_activations: bool) -> str:
    """Return the source of the memory figures of a model whose weights are loaded."""
    if knows_activations:
        return "predicted: weights as loaded, and the formula of activations"
    return "predicted: weights as loaded; activations are not counted, because the sizes of layers are unknown"


def _timed_phases(
    plan: Plan, sizes: Mapping[str, float], hardware: Hardware, home: str, transport: str, numbers: Mapping[str, int]
) -> tuple[tuple[LayerPhase, ...] | None, str, float]:
    """Return the segments between slot operations as phases, each with the bank that it reads.

    Returns the phases, or None with the reason if costs are unknown, and the fraction of the time that is memory
    traffic.
    """
    segments = [step for step in plan.steps if step.op == "segment"]
    if plan.cost is None or not segments:
        return (
            None,
            f"the graph has no costs of segments, because pass {'partition' if plan.cost else 'cost'} is disabled",
            0.0,
        )
    try:
        costs = iter([(0.0, 0.0, 0.0) if step.cost is None else step.cost.at(sizes) for step in segments])
        of_blocks = [(0.0, 0.0, 0.0) if block.cost is None else block.cost.at(sizes) for block in plan.blocks]
    except InputError as error:
        return None, f"the graph's inputs do not determine its costs: {error}", 0.0
    if not plan.dtype:
        return None, "the graph has no GEMMs and no floating-point inputs, whose dtype would determine its speed", 0.0
    expert_dtypes = {bank.index: short_dtype(torch.float8_e4m3fn) for bank in plan.banks if bank.fp8}
    try:
        for dtype in (plan.dtype, *expert_dtypes.values()):
            peak_flops_per_s(hardware, dtype)
    except InputError as error:
        return None, str(error), 0.0
    # A layer that is applied twice is two blocks with the same name, in the order in which they run.
    experts: dict[str, deque[_BlockWork]] = {}
    for block, (flops, moved, _) in zip(plan.blocks, of_blocks, strict=True):
        dtype = short_dtype(block.dtype)
        if block.bank is not None:
            dtype = expert_dtypes.get(block.bank, dtype)
        experts.setdefault(block.name, deque()).append(_BlockWork(dtype, flops, moved))
    timing = _WorkSeconds(hardware, short_dtype(plan.dtype))
    phases: list[LayerPhase] = []
    reading: list[tuple[int, _BlockWork | None]] = []
    for step in plan.steps:
        if step.op == "acquire":
            assert step.bank is not None
            bank = plan.bank(step.bank)
            queue = experts.get(step.name)
            work = queue.popleft() if queue else None
            computing = 0.0 if work is None else timing.experts(work)
            nbytes, number = bank.format.slot_bytes, numbers[bank.name]
            in_place = _read_in_place_bytes(bank)
            phases.append(
                LayerPhase(
                    bank.name,
                    bank.name,
                    computing,
                    nbytes,
                    gather_seconds(hardware, bank.format.link_bytes, home, transport),
                    number=number,
                    read_in_place_bytes=in_place,
                    encoded_bytes=bank.format.encoded_bytes,
                    decode_seconds=decode_seconds(hardware, bank.format),
                )
            )
            reading.append((step.bank, work))
        elif step.op == "release":
            reading.remove(next(entry for entry in reading if entry[0] == step.bank))
        elif step.op == "segment":
            flops, moved, _ = next(costs)
            if not reading:
                phases.append(LayerPhase(step.name, step.name, timing.dense(flops, moved)))
                continue
            # The grouped GEMMs of the segment's block were counted at the acquire, so they are subtracted once.
            bank_index, counted = reading[-1]
            if counted is not None:
                flops, moved = max(0.0, flops - counted.flops), max(0.0, moved - counted.moved)
                reading[-1] = (bank_index, None)
            dense = timing.dense(flops, moved)
            phases[-1] = dataclasses.replace(phases[-1], compute_seconds=phases[-1].compute_seconds + dense)
    return tuple(phases), "", timing.memory_seconds / timing.seconds if timing.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class _BlockWork:
    """FLOPs and bytes of a block's grouped GEMMs."""

    dtype: str
    flops: float
    moved: float


@dataclasses.dataclass
class _WorkSeconds:
    """Total seconds of work, and the seconds that are memory traffic; `dtype` is the dtype of work outside blocks."""

    hardware: Hardware
    dtype: str
    seconds: float = 0.0
    memory_seconds: float = 0.0

    def experts(self, work: _BlockWork) -> float:
        return self._timed(work.dtype, work.flops, work.moved, "grouped_gemm")

    def dense(self, flops: float, moved: float) -> float:
        return self._timed(self.dtype, flops, moved, "gemm")

    def _timed(self, dtype: str, flops: float, moved: float, kind: Work) -> float:
        seconds = work_seconds(self.hardware, dtype, flops, moved, kind)
        self.seconds += seconds
        if seconds > work_seconds(self.hardware, dtype, flops, 0.0, kind):
            self.memory_seconds += seconds
        return seconds
