"""Forecast of a model on a machine: a plan in numbers, from sizes alone.

Pseudo-code
    phases: every layer's attention, then its experts with their bank, then the head
    memory left over beside dense weights, this rank's shards and activations goes to slots and resident banks
    the schedule with the least exposed time that fits, simulated in its steady state
    compared with all other strategies; the fastest that fits is chosen, and may be another one
    the same schedule for other numbers of tokens: from where on does it pay?
"""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.communication import background_bytes
from moepass.models.formulas.layers import model_flops
from moepass.models.formulas.saturation import GAMMA, Saturation
from moepass.passes.ir.decisions import ASYNCEP, Decisions, DeviceMemory
from moepass.passes.ir.protocol import PlanError
from moepass.passes.machine.layer_times import sequences_of
from moepass.passes.machine.times import peak_flops_per_s
from moepass.passes.planner.all_to_all_crossover import MOST_TOKENS
from moepass.passes.planner.host_memory import HostMemory, host_memory
from moepass.passes.planner.make_plan import (
    DEFAULT_SLOTS,
    MOST_SLOTS,
    MadePlan,
    PlanningProblem,
    device_memory,
    make_plan,
)
from moepass.passes.planner.model_problem import (
    bank_transfer,
    device_shard_bytes,
    link_bytes,
    model_phases,
    model_problem,
    read_in_place_bytes,
    resting_memory,
    saturation_at,
    streaming_machine,
    threshold,
)
from moepass.passes.planner.phases import LayerPhase, RingSchedule, ring_schedule
from moepass.passes.planner.simulate import Simulation, simulate_phases
from moepass.passes.planner.strategies import (
    Setting,
    StrategyCost,
    compare_strategies,
    resident_cost,
    strategy_cost,
)
from moepass.passes.planner.verdict import ranking, reason

# Points of a threshold curve.
_MOST_POINTS = 9


@dataclasses.dataclass(frozen=True)
class Forecast:
    """`decisions`, `schedule` and `simulation` are those of asyncep, and None where not even one slot fits; `memory` is
    then what two slots would need, and `host` the host memory of the machine with it.

    `saturation` is that of the typical layer with experts at the rate that it reaches there, `at_peak` that at the
    peak rate.
    `comparison` holds all strategies, asyncep and resident included; `chosen` is the fastest that fits. `mfu` is the
    part of the peak rate that asyncep's step would use.
    """

    setting: Setting
    home: str
    transfer_seconds: float
    phases: tuple[LayerPhase, ...]
    decisions: Decisions | None
    schedule: RingSchedule | None
    simulation: Simulation | None
    memory: DeviceMemory
    host: HostMemory
    saturation: Saturation
    at_peak: Saturation
    comparison: tuple[StrategyCost, ...]
    chosen: str
    runner_up: str | None
    reason: str
    mfu: float | None

    def cost(self, strategy: str) -> StrategyCost:
        return next(cost for cost in self.comparison if cost.strategy == strategy)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One number of tokens per rank: a step of asyncep, the part of it that waits for experts, a step of AllToAll."""

    tokens: int
    step_seconds: float
    exposed_seconds: float
    all_to_all_seconds: float


def forecast(setting: Setting, home: str, gamma: float = GAMMA, most_slots: int = MOST_SLOTS) -> Forecast:
    """Plan `setting` with experts at rest in `home`: device, peer, host, hybrid or disk.

    Raises InputError where the machine lacks the link, where the model has no experts, or for a dtype without a rate;
    ValueError for `most_slots` below 1.
    """
    architecture, hardware = setting.architecture, setting.hardware
    layer = architecture.typical_moe_layer
    _, transfer = bank_transfer(setting, layer, home)
    saturated = threshold(setting, layer, transfer, gamma)
    problem = model_problem(setting, home, most_slots=most_slots, threshold_tokens=saturated.tokens)
    made = _plan(problem)
    simulation = None if made is None else made.simulation
    memory = _two_slots(problem) if made is None or made.memory is None else made.memory
    host = host_memory(setting, home, memory.peak_bytes)
    streamed = StrategyCost(
        ASYNCEP,
        simulation.step_seconds if simulation else float("inf"),
        0.0,
        memory.peak_bytes,
        simulation is not None and memory.peak_bytes <= setting.budget_bytes and host.fits is not False,
        float(background_bytes(home, link_bytes(setting, layer), setting.ranks)),
    )
    comparison = (*compare_strategies(setting), streamed, resident_cost(setting))
    chosen, runner_up = ranking(comparison, setting.ranks)
    flops = model_flops(architecture, setting.sequences.count, setting.sequences.length)
    peak = peak_flops_per_s(hardware, setting.dtype).value
    return Forecast(
        setting=setting,
        home=home,
        transfer_seconds=transfer,
        phases=problem.phases,
        decisions=None if made is None else made.decisions,
        schedule=None if made is None else made.schedule,
        simulation=simulation,
        memory=memory,
        host=host,
        saturation=saturated,
        at_peak=saturation_at(setting, layer, transfer, peak, gamma),
        comparison=comparison,
        chosen=chosen,
        runner_up=runner_up,
        reason=reason(comparison, chosen, runner_up, simulation if streamed.fits else None),
        mfu=float(flops) / simulation.step_seconds / peak if simulation else None,
    )


def _plan(problem: PlanningProblem) -> MadePlan | None:
    try:
        return make_plan(problem)
    except PlanError:
        return None


def _two_slots(problem: PlanningProblem) -> DeviceMemory:
    """What asyncep would need, where it does not fit. Two slots are the least that overlaps anything."""
    assert problem.resting is not None
    return device_memory(problem.resting, ring_schedule(problem.phases, DEFAULT_SLOTS, ()))


def curve_point(planned: Forecast, tokens: int) -> CurvePoint:
    """`planned`'s schedule with another number of tokens per rank and step, memory left out of account.

    Sequences keep their length, and `tokens` is rounded down to whole sequences. A step of fewer tokens than one
    sequence has one shorter sequence.
    `all_to_all_seconds` are those of dp_ep; on one device, where nothing is exchanged, of all experts resident.
    """
    setting = dataclasses.replace(planned.setting, sequences=sequences_of(tokens, planned.setting.sequences.length))
    phases = model_phases(setting, planned.home)
    machine, found = streaming_machine(setting, planned.home), planned.schedule
    if found is not None:
        run = simulate_phases(phases, found.slots, found.resident, machine)
    else:
        # Two slots: the slower of link and computation sets the pace.
        run = simulate_phases(phases, DEFAULT_SLOTS, machine=machine)
    exchanged = strategy_cost(setting, "dp_ep").step_seconds
    return CurvePoint(setting.sequences.tokens, run.step_seconds, run.exposed_seconds, exchanged)


def crossover_tokens(planned: Forecast) -> int | None:
    """Tokens per rank from which on asyncep, as planned, takes no longer than AllToAll (dp_ep), to within 1/256.

    None on one device, where nothing is exchanged, and where it never is so.
    """
    if planned.setting.ranks == 1:
        return None

    def pays(tokens: int) -> bool:
        point = curve_point(planned, tokens)
        return point.step_seconds <= point.all_to_all_seconds

    if not pays(MOST_TOKENS):
        return None
    low, high = 0, MOST_TOKENS
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


@dataclasses.dataclass(frozen=True)
class ThresholdPoint:
    """With `resident_layers` banks at rest beside two slots: bytes on one device, and tokens per rank and step."""

    resident_layers: int
    memory_bytes: float
    tokens: int


def threshold_curve(planned: Forecast) -> tuple[ThresholdPoint, ...]:
    """What memory buys: the saturation threshold from no bank at rest to all of them, in about equal steps.

    A bank that stays need not be moved, and its layer's computation hides the transfers of others: with R of L banks at
    rest, what moves in the mean over layers is (L - R) / L of a bank. Whether the memory is there is not asked.
    """
    setting = planned.setting
    architecture = setting.architecture
    layer, count = architecture.typical_moe_layer, len(architecture.moe_layers)
    assert layer.experts is not None
    nbytes, shard = setting.bank(layer.experts).slot_bytes, device_shard_bytes(setting, layer, planned.home)
    slot = nbytes - read_in_place_bytes(setting, layer, planned.home)
    resting, gamma = resting_memory(setting, planned.home).peak_bytes, planned.saturation.values["gamma"]
    points = []
    for resident in sorted({round(step * count / (_MOST_POINTS - 1)) for step in range(_MOST_POINTS)}):
        streamed = count - resident
        tokens = threshold(setting, layer, planned.transfer_seconds * streamed / count, gamma).tokens
        slots = min(DEFAULT_SLOTS, streamed)
        points.append(ThresholdPoint(resident, resting + slots * slot + resident * nbytes + streamed * shard, tokens))
    return tuple(points)
