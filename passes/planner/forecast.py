"""What moepass would do with a model on a machine, and what that takes: a plan in numbers, from sizes alone.

Pseudo-code
    stages: every layer's mixing, then its experts with their bank, then the head
    memory left over beside dense weights, this rank's shards and activations goes to slots and resident banks
    the schedule with the least exposed time that fits, simulated in its steady state
    compared with all other strategies; the fastest that fits is chosen, and may be another one
    the same schedule for other numbers of tokens: from where on does it pay?
"""

from __future__ import annotations

import dataclasses

from moepass.models.formulas.communication import background_bytes
from moepass.models.formulas.layers import flops_per_token, model_flops
from moepass.models.formulas.saturation import GAMMA, Saturation, saturation
from moepass.models.homes import home_named
from moepass.models.sizes.architecture import Layer
from moepass.passes.ir.protocol import PlanError
from moepass.passes.machine.hardware import without_emulation
from moepass.passes.machine.layer_times import LayerSeconds, Texts, head_seconds, layer_seconds, texts_of
from moepass.passes.machine.times import gather_seconds, link_seconds, peak_flops_per_s
from moepass.passes.planner.all_to_all_crossover import MOST_TOKENS
from moepass.passes.planner.host_memory import HostMemory, host_memory
from moepass.passes.planner.phases import LayerPhase, streamed_stages
from moepass.passes.planner.schedule_search import FoundSchedule, search_schedule
from moepass.passes.planner.simulate import Machine, Simulation, simulate_stages
from moepass.passes.planner.strategies import (
    ASYNCEP,
    Setting,
    StrategyCost,
    activations_bytes,
    banks_bytes,
    compare_strategies,
    resident_cost,
    strategy_cost,
)
from moepass.passes.planner.verdict import ranking, reason

MOST_SLOTS = 4
# Relative: what differs by less takes the same time. A bank less that stays may cost the memory its copy takes.
_ROUNDING = 1e-3
# Of the threshold and its rate; a few are enough.
_MOST_ROUNDS = 50


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: weights that stay (shards and resident banks too), slots with stages, activations."""

    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.slot_bytes + self.activation_bytes + self.kv_bytes


@dataclasses.dataclass(frozen=True)
class Forecast:
    """`schedule` and `simulation` are those of asyncep, and None where not even one slot fits; `memory` with them,
    and `host`, the host memory of the machine.

    `saturation` is that of the typical layer with experts at the rate that it reaches there, `at_peak` that at the
    peak rate.
    `comparison` holds all strategies, asyncep and resident included; `chosen` is the fastest that fits. `mfu` is the
    part of the peak rate that asyncep's step would use.
    """

    setting: Setting
    home: str
    transfer_seconds: float
    stages: tuple[LayerPhase, ...]
    schedule: FoundSchedule | None
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
    _, transfer = _bank(setting, layer, home)
    stages = model_stages(setting, home)
    schedule, simulation, memory = _asyncep(setting, home, stages, most_slots)
    host = host_memory(setting, home, memory.peak_bytes)
    streamed = StrategyCost(
        ASYNCEP,
        simulation.step_seconds if simulation else float("inf"),
        0.0,
        memory.peak_bytes,
        simulation is not None and memory.peak_bytes <= setting.budget_bytes and host.fits is not False,
        float(background_bytes(home, _link_bytes(setting, layer), setting.ranks)),
    )
    comparison = (*compare_strategies(setting), streamed, resident_cost(setting))
    chosen, runner_up = ranking(comparison, setting.ranks)
    flops = model_flops(architecture, setting.texts.batch, setting.texts.sequence)
    peak = peak_flops_per_s(hardware, setting.dtype).value
    return Forecast(
        setting=setting,
        home=home,
        transfer_seconds=transfer,
        stages=stages,
        schedule=schedule,
        simulation=simulation,
        memory=memory,
        host=host,
        saturation=threshold(setting, layer, transfer, gamma),
        at_peak=_saturation(setting, layer, transfer, peak, gamma),
        comparison=comparison,
        chosen=chosen,
        runner_up=runner_up,
        reason=reason(comparison, chosen, runner_up, simulation if streamed.fits else None),
        mfu=float(flops) / simulation.step_seconds / peak if simulation else None,
    )


def model_stages(setting: Setting, home: str) -> tuple[LayerPhase, ...]:
    """All layers in order; a bank is read from its router on, so mixing is a stage of its own."""
    stages: list[LayerPhase] = []
    seconds = {layer: _seconds(setting, layer) for layer in setting.architecture.layer_counts}
    banks = {layer: _bank(setting, layer, home) for layer in seconds}
    for index, layer in enumerate(setting.architecture.layers):
        name, (nbytes, transfer) = f"layer {index}", banks[layer]
        stages.append(LayerPhase(f"{name} attention", name, seconds[layer].mixing))
        stages.append(
            LayerPhase(f"{name} {'experts' if nbytes else 'mlp'}", name, seconds[layer].mlp, nbytes, transfer)
        )
    head = head_seconds(setting.hardware, setting.architecture, setting.texts, setting.dtype)
    stages.append(LayerPhase("head", "head", head))
    return tuple(stages)


def threshold(setting: Setting, layer: Layer, transfer: float, gamma: float = GAMMA) -> Saturation:
    """The threshold at the rate that is reached with as many tokens, whatever number of them is planned.

    Few tokens wait for memory, far below the rate of many: a threshold at their rate would be too low. From above the
    rate comes down with the tokens until they agree.
    """
    found = _saturation(setting, layer, transfer, peak_flops_per_s(setting.hardware, setting.dtype).value, gamma)
    for _ in range(_MOST_ROUNDS):
        last, rate = found.tokens, _reached_rate(setting, layer, max(1, found.tokens))
        found = _saturation(setting, layer, transfer, rate, gamma)
        if abs(found.tokens - last) <= last * _ROUNDING / 10:
            break
    return found


def _reached_rate(setting: Setting, layer: Layer, tokens: int) -> float:
    """FLOP/s of a layer's products and passes together, attention scores apart: what n · f runs at."""
    seconds = _seconds(dataclasses.replace(setting, texts=Texts(tokens, 1)), layer)
    without_scores = seconds.total - seconds.mixing_scores
    return tokens * flops_per_token(layer, setting.architecture.hidden) / without_scores


def least_memory_bytes(setting: Setting, home: str) -> float:
    """The least that asyncep needs on one device: what rests there, activations, and one slot."""
    if home == "device":
        return resident_cost(setting).memory_bytes
    largest = max(_bank(setting, layer, home)[0] for layer in setting.architecture.layer_counts)
    return resting_memory(setting, home).peak_bytes + largest


def curve_point(planned: Forecast, tokens: int) -> CurvePoint:
    """`planned`'s schedule with another number of tokens per rank and step, memory left out of account.

    Texts keep their length, but for steps of less than one text, so that `tokens` come down to whole texts.
    `all_to_all_seconds` are those of dp_ep; on one device, where nothing is exchanged, of all experts resident.
    """
    setting = dataclasses.replace(planned.setting, texts=texts_of(tokens, planned.setting.texts.sequence))
    stages = model_stages(setting, planned.home)
    machine, found = streaming_machine(setting, planned.home), planned.schedule
    if found is not None:
        run = simulate_stages(stages, found.slots, found.resident, found.order, machine)
    else:
        # Two slots: the slower of link and computation sets the pace.
        run = simulate_stages(stages, 2, machine=machine)
    exchanged = strategy_cost(setting, "dp_ep").step_seconds
    return CurvePoint(setting.texts.tokens, run.step_seconds, run.exposed_seconds, exchanged)


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


def _seconds(setting: Setting, layer: Layer) -> LayerSeconds:
    return layer_seconds(setting.hardware, layer, setting.architecture.hidden, setting.texts, setting.dtype)


def _bank(setting: Setting, layer: Layer, home: str) -> tuple[int, float]:
    """Bytes of a layer's bank in a slot, and the seconds that it takes to get there."""
    if layer.experts is None:
        return 0, 0.0
    sizes = setting.bank(layer.experts)
    return sizes.slot_bytes, gather_seconds(setting.hardware, sizes.link_bytes, home)


def _link_bytes(setting: Setting, layer: Layer) -> int:
    """Bytes of a layer's bank on its way into a slot."""
    return setting.bank(layer.experts).link_bytes if layer.experts is not None else 0


def resting_memory(setting: Setting, home: str) -> DeviceMemory:
    """What is on the device whatever the schedule: dense weights, this rank's shards or stages, activations."""
    dense, activations = setting.dense_bytes, activations_bytes(setting)
    record = home_named(home)
    shards = banks_bytes(setting) / setting.ranks if record.is_spread and record.rests_in == "device" else 0.0
    largest = max(_link_bytes(setting, layer) for layer in setting.architecture.layer_counts)
    stages = record.staging_buffers * largest / setting.ranks
    return DeviceMemory(dense + shards, stages, activations)


def _asyncep(
    setting: Setting, home: str, stages: tuple[LayerPhase, ...], most_slots: int
) -> tuple[FoundSchedule | None, Simulation | None, DeviceMemory]:
    fixed = resting_memory(setting, home)
    # With home device everything stays, whether it fits or not.
    left = setting.budget_bytes - fixed.peak_bytes if home != "device" else float(sum(s.bank_bytes for s in stages))
    try:
        found = search_schedule(stages, int(left), most_slots)
    except PlanError:
        # Two slots are the least that overlaps anything: what is missing shows in the memory.
        largest = max(stage.bank_bytes for stage in stages)
        return None, None, dataclasses.replace(fixed, slot_bytes=fixed.slot_bytes + 2.0 * largest)
    found, simulation = _with_second_slot(stages, found, int(left), most_slots, streaming_machine(setting, home))
    memory = dataclasses.replace(
        fixed,
        resident_bytes=fixed.resident_bytes + found.resident_bytes,
        slot_bytes=fixed.slot_bytes + found.slots * found.slot_bytes,
    )
    return found, simulation, memory


def _with_second_slot(
    stages: tuple[LayerPhase, ...], found: FoundSchedule, memory_bytes: int, most_slots: int, machine: Machine
) -> tuple[FoundSchedule, Simulation]:
    """`found`, simulated; of one slot, a second one takes the place of a resident bank where that costs no time.

    Behind one slot only attention hides a transfer. What the search cannot know is how well its times are known.
    """
    simulation = simulate_stages(stages, found.slots, found.resident, found.order, machine)
    if found.slots != 1 or most_slots < 2 or not found.order:
        return found, simulation
    resident = found.resident if found.memory_bytes + found.slot_bytes <= memory_bytes else found.resident[:-1]
    changed = dataclasses.replace(
        found,
        slots=2,
        resident=resident,
        order=streamed_stages(stages, resident),
        resident_bytes=sum(stages[place].bank_bytes for place in resident),
        slot_bytes=max(stages[place].bank_bytes for place in streamed_stages(stages, resident)),
    )
    if changed.memory_bytes > memory_bytes:
        return found, simulation
    second = simulate_stages(stages, 2, changed.resident, changed.order, machine)
    if second.step_seconds > simulation.step_seconds * (1 + _ROUNDING):
        return found, simulation
    return dataclasses.replace(
        changed, step_seconds=second.step_seconds, exposed_seconds=second.exposed_seconds
    ), second


def streaming_machine(setting: Setting, home: str) -> Machine:
    """How copies and computation act together.

    Copies slow products and memory passes down by different factors: their mean over the model. An emulated link is
    busy for longer than it copies, and slows nothing down while it waits: the mean over that time too.
    """
    kinds = [(count, _seconds(setting, layer)) for layer, count in setting.architecture.layer_counts.items()]
    total = sum(count * seconds.total for count, seconds in kinds)
    passes = sum(count * (seconds.mixing_passes + seconds.mlp_passes) for count, seconds in kinds)
    overlap = setting.hardware.overlap
    slowdown = (overlap.gemm.value * (total - passes) + overlap.memory.value * passes) / total
    on_host = setting.hardware.device_kind == "cpu"
    layer = setting.architecture.typical_moe_layer
    nbytes, (_, transfer) = _link_bytes(setting, layer), _bank(setting, layer, home)
    true = without_emulation(setting.hardware)
    copies = link_seconds(true, nbytes, home)
    # A processor that computes makes one copy after the other; devices have an engine for each link.
    copying = sum(copies) if on_host else max((0.0, *copies))
    copied_part = min(1.0, copying / transfer) if transfer else 0.0
    return Machine(copy_slowdown=1.0 + max(0.0, slowdown - 1.0) * copied_part, host_runs_ahead=not on_host)


def _saturation(setting: Setting, layer: Layer, transfer: float, rate: float, gamma: float) -> Saturation:
    return saturation(
        layer,
        setting.architecture.hidden,
        transfer_seconds=transfer,
        flops_per_s=rate,
        gamma=gamma,
        sequence=setting.texts.sequence,
    )
