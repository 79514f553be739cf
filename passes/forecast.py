"""What moepass would do with a model on a machine, and what that takes: a plan in numbers, from sizes alone.

Pseudo-code
    stages: every layer's mixing, then its experts with their bank, then the head
    memory left over beside dense weights, this rank's shards and activations goes to slots and resident banks
    the schedule with the least exposed time that fits, simulated in its steady state
    compared with all other strategies; the fastest that fits is chosen, and may be another one
"""

from __future__ import annotations

import dataclasses

from moepass.models.architecture import Layer
from moepass.models.formulas.layers import flops_per_token, model_flops
from moepass.models.formulas.memory import bank_bytes, resident_bytes
from moepass.models.formulas.saturation import GAMMA, Saturation, saturation
from moepass.passes.layer_times import LayerSeconds, Texts, head_seconds, layer_seconds
from moepass.passes.protocol import PlanError
from moepass.passes.schedule_search import FoundSchedule, search_schedule
from moepass.passes.simulate import Machine, Simulation, simulate_stages
from moepass.passes.stages import Stage
from moepass.passes.strategies import (
    Setting,
    StrategyCost,
    activations_bytes,
    banks_bytes,
    compare_strategies,
    resident_cost,
)
from moepass.passes.times import gather_seconds, peak_flops_per_s

ASYNCEP, RESIDENT = "asyncep", "resident"
MOST_SLOTS = 4
# Tokens per rank beyond which nobody asks where a border lies.
_MOST_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: weights that stay (shards and resident banks too), slots, activations."""

    resident_bytes: float
    slot_bytes: float
    activation_bytes: float
    kv_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.slot_bytes + self.activation_bytes + self.kv_bytes


@dataclasses.dataclass(frozen=True)
class Forecast:
    """`schedule` and `simulation` are those of asyncep, and None where not even one slot fits; `memory` with them.

    `saturation` is that of the typical layer with experts at the rate it reaches, `at_peak` that at the peak rate.
    `comparison` holds all strategies, asyncep and resident included; `chosen` is the fastest that fits.
    """

    setting: Setting
    home: str
    transfer_seconds: float
    stages: tuple[Stage, ...]
    schedule: FoundSchedule | None
    simulation: Simulation | None
    memory: DeviceMemory
    saturation: Saturation
    at_peak: Saturation
    comparison: tuple[StrategyCost, ...]
    chosen: str
    runner_up: str | None
    reason: str
    crossover_tokens: int | None
    mfu: float | None

    def cost(self, strategy: str) -> StrategyCost:
        return next(cost for cost in self.comparison if cost.strategy == strategy)


def forecast(setting: Setting, home: str, gamma: float = GAMMA) -> Forecast:
    """Plan `setting` with experts at rest in `home`: peer, host, hybrid or disk.

    Raises InputError where the machine lacks the link, where the model has no experts, or for a dtype without a rate.
    """
    architecture, hardware = setting.architecture, setting.hardware
    layer = architecture.typical_moe_layer
    assert layer.experts is not None
    transfer = gather_seconds(hardware, bank_bytes(layer.experts, architecture.hidden, setting.dtype), home)
    stages = model_stages(setting, home)
    fixed = DeviceMemory(_rests_on_device(setting, home), 0.0, activations_bytes(setting, setting.texts.tokens))
    schedule, simulation, memory = _asyncep(setting, stages, fixed)
    streamed = StrategyCost(
        ASYNCEP,
        simulation.step_seconds if simulation else float("inf"),
        0.0,
        memory.peak_bytes,
        simulation is not None and memory.peak_bytes <= setting.budget_bytes,
    )
    comparison = (*compare_strategies(setting), streamed, resident_cost(setting))
    chosen, runner_up = _ranking(comparison)
    typical = _seconds(setting, layer)
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
        saturation=_saturation(setting, layer, transfer, reached_rate(setting, layer, typical), gamma),
        at_peak=_saturation(setting, layer, transfer, peak, gamma),
        comparison=comparison,
        chosen=chosen,
        runner_up=runner_up,
        reason=_reason(comparison, chosen, runner_up, simulation),
        crossover_tokens=crossover_tokens(setting, home),
        mfu=float(flops) / simulation.step_seconds / peak if simulation else None,
    )


def model_stages(setting: Setting, home: str) -> tuple[Stage, ...]:
    """All layers in order; a bank is read from its router on, so mixing is a stage of its own."""
    stages: list[Stage] = []
    seconds = {layer: _seconds(setting, layer) for layer in setting.architecture.layer_counts}
    banks = {layer: _bank(setting, layer, home) for layer in seconds}
    for index, layer in enumerate(setting.architecture.layers):
        name, (nbytes, transfer) = f"layer {index}", banks[layer]
        stages.append(Stage(f"{name} attention", name, seconds[layer].mixing))
        stages.append(Stage(f"{name} {'experts' if nbytes else 'mlp'}", name, seconds[layer].mlp, nbytes, transfer))
    head = head_seconds(setting.hardware, setting.architecture, setting.texts, setting.dtype)
    stages.append(Stage("head", "head", head))
    return tuple(stages)


def reached_rate(setting: Setting, layer: Layer, seconds: LayerSeconds) -> float:
    """FLOP/s of a layer's products and passes together, attention scores apart: what n · f runs at."""
    without_scores = seconds.total - seconds.mixing_scores
    return setting.texts.tokens * flops_per_token(layer, setting.architecture.hidden) / without_scores


def crossover_tokens(setting: Setting, home: str) -> int | None:
    """Tokens per rank from which on asyncep takes no longer than AllToAll (dp_ep); None on one device, and where that
    is never so. Texts keep their length, but for steps of less than one text."""
    if setting.ranks == 1:
        return None

    def is_faster(tokens: int) -> bool:
        sequence = min(tokens, setting.texts.sequence)
        texts = Texts(max(1, tokens // sequence), sequence)
        changed = dataclasses.replace(setting, texts=texts)
        stages = model_stages(changed, home)
        moved = sum(stage.transfer_seconds for stage in stages)
        # In a steady stream of equal layers the slower of both sets the pace.
        streamed = max(moved, sum(stage.compute_seconds for stage in stages))
        return streamed <= next(cost.step_seconds for cost in compare_strategies(changed) if cost.strategy == "dp_ep")

    if not is_faster(_MOST_TOKENS):
        return None
    low, high = 0, _MOST_TOKENS
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high


def _seconds(setting: Setting, layer: Layer) -> LayerSeconds:
    return layer_seconds(setting.hardware, layer, setting.architecture.hidden, setting.texts, setting.dtype)


def _bank(setting: Setting, layer: Layer, home: str) -> tuple[int, float]:
    if layer.experts is None:
        return 0, 0.0
    nbytes = bank_bytes(layer.experts, setting.architecture.hidden, setting.dtype)
    return nbytes, gather_seconds(setting.hardware, nbytes, home)


def _rests_on_device(setting: Setting, home: str) -> float:
    """Dense weights, and with home peer this rank's shards."""
    dense = resident_bytes(setting.architecture, setting.dtype)
    return dense + (banks_bytes(setting) / setting.ranks if home == "peer" else 0)


def _asyncep(
    setting: Setting, stages: tuple[Stage, ...], fixed: DeviceMemory
) -> tuple[FoundSchedule | None, Simulation | None, DeviceMemory]:
    left = setting.budget_bytes - fixed.peak_bytes
    try:
        found = search_schedule(stages, int(left), MOST_SLOTS)
    except PlanError:
        # Two slots are the least that overlaps anything: what is missing shows in the memory.
        largest = max(stage.bank_bytes for stage in stages)
        return None, None, dataclasses.replace(fixed, slot_bytes=2.0 * largest)
    simulation = simulate_stages(stages, found.slots, found.resident, found.order, _machine(setting, stages))
    memory = dataclasses.replace(
        fixed,
        resident_bytes=fixed.resident_bytes + found.resident_bytes,
        slot_bytes=float(found.slots * found.slot_bytes),
    )
    return found, simulation, memory


def _machine(setting: Setting, stages: tuple[Stage, ...]) -> Machine:
    """Copies slow products and memory passes down by different factors: their mean over the model."""
    kinds = [(count, _seconds(setting, layer)) for layer, count in setting.architecture.layer_counts.items()]
    total = sum(count * seconds.total for count, seconds in kinds)
    passes = sum(count * (seconds.mixing_passes + seconds.mlp_passes) for count, seconds in kinds)
    overlap = setting.hardware.overlap
    slowdown = (overlap.gemm.value * (total - passes) + overlap.memory.value * passes) / total
    conditions = setting.hardware.conditions
    return Machine(copy_slowdown=max(1.0, slowdown), host_runs_ahead=conditions is None or conditions.device != "cpu")


def _saturation(setting: Setting, layer: Layer, transfer: float, rate: float, gamma: float) -> Saturation:
    return saturation(
        layer,
        setting.architecture.hidden,
        transfer_seconds=transfer,
        flops_per_s=rate,
        gamma=gamma,
        sequence=setting.texts.sequence,
    )


def _ranking(comparison: tuple[StrategyCost, ...]) -> tuple[str, str | None]:
    """The fastest that fits, and the next one. Of equal ones that which moves nothing, then that which waits for none.

    Where nothing fits: the one that needs the least memory.
    """
    preferred = {RESIDENT: 0, ASYNCEP: 1}
    fitting = sorted(
        (cost for cost in comparison if cost.fits),
        key=lambda cost: (round(cost.step_seconds, 9), preferred.get(cost.strategy, 2)),
    )
    if not fitting:
        return min(comparison, key=lambda cost: cost.memory_bytes).strategy, None
    return fitting[0].strategy, fitting[1].strategy if len(fitting) > 1 else None


def _reason(
    comparison: tuple[StrategyCost, ...], chosen: str, runner_up: str | None, simulation: Simulation | None
) -> str:
    costs = {cost.strategy: cost for cost in comparison}
    if not costs[chosen].fits:
        return (
            f"no strategy fits; {chosen} needs the least memory, {costs[chosen].memory_bytes / 1e9:.1f} GB per device"
        )
    gain = ""
    if runner_up is not None:
        ratio = costs[runner_up].step_seconds / costs[chosen].step_seconds
        gain = f", {ratio:.2f} times as fast as {runner_up}, the next that fits"
    if chosen == RESIDENT:
        return f"all experts fit on every device, so nothing moves{gain}"
    if chosen == ASYNCEP:
        assert simulation is not None
        hidden = 1 - simulation.exposed_seconds / simulation.step_seconds
        share = "all transfers are" if hidden > 0.9995 else f"all but {1 - hidden:.1%} of the step's transfers are"
        return f"{share} hidden behind computation, and no rank waits for another{gain}"
    waits = simulation.exposed_seconds / simulation.step_seconds if simulation is not None else None
    instead = "asyncep does not fit" if waits is None else f"asyncep would wait {waits:.0%} of its time for experts"
    return f"{instead} at this number of tokens{gain}"
