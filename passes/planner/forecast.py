"""Forecast of a model on a machine: a plan in numbers, from sizes alone.

Pseudo-code
    phases: every layer's attention, then its experts with their bank, then the head
    memory left by dense weights, this rank's shards and activations goes to slots and resident banks
    the schedule with the least exposed time that fits is simulated in its steady state
    it is compared with all other strategies; the fastest that fits is chosen
    the same schedule is simulated with other numbers of tokens, to find the smallest number at which it pays
"""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.communication import background_bytes
from moepass.models.formulas.layers import model_flops
from moepass.models.formulas.saturation import GAMMA, Saturation
from moepass.passes.ir.bank_format import ring_bytes
from moepass.passes.ir.planner_decisions import ASYNCEP, Decisions, DeviceMemory
from moepass.passes.ir.protocol import PlanError
from moepass.passes.machine.layer_times import sequences_of
from moepass.passes.machine.times import fill_seconds, peak_flops_per_s
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
    device_shard_bytes,
    model_phases,
    model_problem,
    read_in_place_bytes,
    resting_memory,
    saturation_at,
    streaming_execution,
    threshold,
    typical_bank,
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
    """The planned schedule of asyncep, and its comparison with other strategies.

    Attributes:
        fill_seconds: seconds in which one bank after the other is brought into a slot
        decisions, schedule, simulation: the plan of asyncep; None if not even one slot fits
        memory: memory of one device; if nothing fits, the memory that two slots would need
        host: host memory of the machine
        saturation: saturation threshold of the typical MoE layer at its reached rate
        at_peak: saturation threshold at the peak rate
        comparison: costs of all strategies, including asyncep and resident
        chosen: the fastest strategy that fits
        runner_up: the next that fits, if any
        reason: why `chosen` was chosen
        mfu: fraction of the peak rate that asyncep's step would use
    """

    setting: Setting
    home: str
    fill_seconds: float
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
        """Return the cost of the strategy with this name."""
        return next(cost for cost in self.comparison if cost.strategy == strategy)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Times of one step with `tokens` tokens per rank.

    Attributes:
        step_seconds: time of asyncep
        exposed_seconds: the part of it that is not hidden behind computation
        all_to_all_seconds: time of strategy dp_ep: data-parallel attention, and AllToAll around expert-parallel experts
    """

    tokens: int
    step_seconds: float
    exposed_seconds: float
    all_to_all_seconds: float


def forecast(setting: Setting, home: str, gamma: float = GAMMA, most_slots: int = MOST_SLOTS) -> Forecast:
    """Plan `setting` with experts at rest in `home`: device, peer, host, hybrid or disk.

    Raises InputError if the machine lacks the link, if the model has no experts, or for a dtype without a rate, and
    ValueError for `most_slots` below 1.
    """
    architecture, hardware = setting.architecture, setting.hardware
    layer = architecture.typical_moe_layer
    bank = typical_bank(setting)
    # With home `device` all layers are resident.
    filling = fill_seconds(hardware, bank, home, setting.transport) if home != "device" else 0.0
    saturated = threshold(setting, layer, filling, gamma)
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
        float(background_bytes(home, bank.link_bytes, setting.ranks)),
    )
    comparison = (*compare_strategies(setting), streamed, resident_cost(setting))
    chosen, runner_up = ranking(comparison, setting.ranks)
    flops = model_flops(architecture, setting.sequences.count, setting.sequences.length)
    peak = peak_flops_per_s(hardware, setting.dtype).value
    return Forecast(
        setting=setting,
        home=home,
        fill_seconds=filling,
        phases=problem.phases,
        decisions=None if made is None else made.decisions,
        schedule=None if made is None else made.schedule,
        simulation=simulation,
        memory=memory,
        host=host,
        saturation=saturated,
        at_peak=saturation_at(setting, layer, filling, peak, gamma),
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
    """Return the memory of asyncep with two slots, the fewest that overlap copies and experts."""
    assert problem.resting is not None
    return device_memory(problem.resting, ring_schedule(problem.phases, DEFAULT_SLOTS, ()))


def curve_point(planned: Forecast, tokens: int) -> CurvePoint:
    """Simulate `planned`'s schedule with another number of tokens per rank and step, ignoring memory.

    Sequences keep their length, and `tokens` is rounded down to whole sequences. A step of fewer tokens than one
    sequence has one shorter sequence. On a single device, `all_to_all_seconds` is the time with all experts resident.
    """
    setting = dataclasses.replace(planned.setting, sequences=sequences_of(tokens, planned.setting.sequences.length))
    phases = model_phases(setting, planned.home)
    machine, schedule = streaming_execution(setting, planned.home), planned.schedule
    if schedule is not None:
        run = simulate_phases(phases, schedule.slots, schedule.resident, machine)
    else:
        # With two slots, the slower of link and computation sets the pace.
        run = simulate_phases(phases, DEFAULT_SLOTS, machine=machine)
    exchanged = strategy_cost(setting, "dp_ep").step_seconds
    return CurvePoint(setting.sequences.tokens, run.step_seconds, run.exposed_seconds, exchanged)


def crossover_tokens(planned: Forecast) -> int | None:
    """Return the smallest number of tokens per rank at which asyncep is not slower than AllToAll (dp_ep).

    The number is accurate to 1/256.

    Returns None on a single device, which exchanges nothing, and if AllToAll is always faster.
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
    """The saturation threshold with a number of resident banks and two slots.

    Attributes:
        memory_bytes: memory of one device
        tokens: threshold in tokens per rank and step
    """

    resident_layers: int
    memory_bytes: float
    tokens: int


def threshold_curve(planned: Forecast) -> tuple[ThresholdPoint, ...]:
    """Return the saturation threshold for increasing numbers of resident banks, from none to all, ignoring the budget.

    A resident bank is not transferred, and its layer's computation hides transfers of other banks. With R of L banks
    resident, (L - R) / L of a bank is transferred per layer, on average.
    """
    setting = planned.setting
    architecture = setting.architecture
    layer, count = architecture.typical_moe_layer, len(architecture.moe_layers)
    assert layer.experts is not None
    bank = setting.bank(layer.experts)
    nbytes, shard = bank.slot_bytes, device_shard_bytes(setting, layer, bank, planned.home)
    slot = nbytes - read_in_place_bytes(setting, layer, bank, planned.home)
    resting, gamma = resting_memory(setting, planned.home).peak_bytes, planned.saturation.values["gamma"]
    points = []
    for resident in sorted({round(step * count / (_MOST_POINTS - 1)) for step in range(_MOST_POINTS)}):
        streamed = count - resident
        tokens = threshold(setting, layer, planned.fill_seconds * streamed / count, gamma).tokens
        slots = min(DEFAULT_SLOTS, streamed)
        ring = ring_bytes(slots, slot, bank.encoded_bytes if streamed else 0)
        points.append(ThresholdPoint(resident, resting + ring + resident * nbytes + streamed * shard, tokens))
    return tuple(points)
