"""The planning problem of a model on a machine, from the sizes of its layers alone.

A bank is read from the router on, so attention is a separate phase.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from moepass.models.formulas.expert_placement import largest_shard_bytes, smallest_shard_bytes
from moepass.models.formulas.layers import flops_per_token, mlp_parameters
from moepass.models.formulas.memory import element_bytes
from moepass.models.formulas.saturation import GAMMA, Saturation, saturation
from moepass.models.formulas.stored_weights import BankSizes
from moepass.models.homes import COLLECTIVE, PULL, home_named
from moepass.models.sizes.architecture import Layer
from moepass.passes.ir.planner_decisions import DeviceMemory
from moepass.passes.machine.hardware import Hardware, without_emulation
from moepass.passes.machine.layer_times import LayerSeconds, Sequences, head_seconds, layer_seconds
from moepass.passes.machine.times import (
    decode_seconds,
    fill_seconds,
    gather_seconds,
    link_seconds,
    memory_seconds,
    peak_flops_per_s,
)
from moepass.passes.planner.make_plan import MOST_SLOTS, ROUNDING, PlanningProblem, Profile
from moepass.passes.planner.phases import LayerPhase
from moepass.passes.planner.schedule_search import least_bank_bytes
from moepass.passes.planner.simulate import ExecutionModel
from moepass.passes.planner.strategies import Setting, activations_bytes, resident_cost

# Iterations between the threshold and its rate; a few are enough.
_MOST_ROUNDS = 50

# Sizes of banks by the number of the layer; the setting knows those of all others.
Banks = Mapping[int, BankSizes]
_BY_SIZES: Banks = {}


def model_problem(
    setting: Setting,
    home: str,
    *,
    most_slots: int = MOST_SLOTS,
    slots: int | None = None,
    resident_layers: tuple[int, ...] | None = None,
    resting: DeviceMemory | None = None,
    threshold_tokens: int | None = None,
    banks: Banks = _BY_SIZES,
) -> PlanningProblem:
    """Return the planning problem of `setting` with experts at rest in `home`.

    With home `device` all layers are resident by default, whether they fit or not. An infinite budget means no budget.

    Args:
        setting: The model on the machine.
        home: Where experts rest.
        most_slots: The largest ring.
        slots: Size of the ring, if already decided.
        resident_layers: Resident layers, if already decided.
        resting: Memory of the device, if known better than from sizes.
        threshold_tokens: The saturation threshold, if known.
        banks: Sizes of banks that are known better than from the setting, by the number of the layer.

    Raises:
        InputError: The machine lacks the link, the model has no experts, or the dtype has no rate.
    """
    phases = model_phases(setting, home, banks)
    typical = typical_bank(setting, banks)
    if threshold_tokens is None:
        filling = fill_seconds(setting.hardware, typical, home, setting.transport)
        threshold_tokens = threshold(setting, setting.architecture.typical_moe_layer, filling).tokens
    stay = None if resident_layers is None else set(resident_layers)
    if home == "device" and stay is None:
        stay, slots = set(setting.architecture.moe_layers), 0
    return PlanningProblem(
        phases=phases,
        home=home,
        resting=resting_memory(setting, home) if resting is None else resting,
        batch=setting.sequences.count,
        sequence=setting.sequences.length,
        machine=streaming_execution(setting, home, typical),
        profile=profile_of(setting.hardware),
        budget_bytes=setting.budget_bytes if math.isfinite(setting.budget_bytes) else None,
        resident=None
        if stay is None
        else tuple(index for index, phase in enumerate(phases) if phase.bank_bytes and phase.number in stay),
        slots=slots,
        most_slots=most_slots,
        threshold=threshold_tokens,
    )


def profile_of(hardware: Hardware) -> Profile:
    """Return name and sources of a profile, for plans."""
    sources = sorted({text.partition(":")[0] for text in hardware.sources().values()})
    return Profile(hardware.name, ", ".join(sources))


def model_phases(setting: Setting, home: str, banks: Banks = _BY_SIZES) -> tuple[LayerPhase, ...]:
    """Return the phases of all layers in order: for each layer attention, then experts or MLP.

    `banks` has sizes of banks that are known better than from the setting, by the number of the layer.
    """
    phases: list[LayerPhase] = []
    seconds = {layer: _seconds(setting, layer) for layer in setting.architecture.layer_counts}
    bank_fields = functools.cache(functools.partial(_bank_fields, setting, home))
    for index, layer in enumerate(setting.architecture.layers):
        name = f"layer {index}"
        phases.append(LayerPhase(f"{name} attention", name, seconds[layer].attention, number=index))
        computing = LayerPhase(f"{name} mlp", name, seconds[layer].mlp, number=index)
        if layer.experts is not None:
            sizes = banks.get(index, setting.bank(layer.experts))
            computing = dataclasses.replace(computing, name=f"{name} experts", **bank_fields(layer, sizes))
        phases.append(computing)
    head = head_seconds(setting.hardware, setting.architecture, setting.sequences, setting.dtype)
    phases.append(LayerPhase("head", "head", head))
    return tuple(phases)


def _bank_fields(setting: Setting, home: str, layer: Layer, bank: BankSizes) -> dict[str, Any]:
    """Return the fields of the phase of experts that describe their bank."""
    return {
        "bank_bytes": bank.slot_bytes,
        "transfer_seconds": gather_seconds(setting.hardware, bank.link_bytes, home, setting.transport),
        "shard_bytes": device_shard_bytes(setting, layer, bank, home),
        "read_in_place_bytes": read_in_place_bytes(setting, layer, bank, home),
        "encoded_bytes": bank.encoded_bytes,
        "decode_seconds": decode_seconds(setting.hardware, bank),
    }


def typical_bank(setting: Setting, banks: Banks = _BY_SIZES) -> BankSizes:
    """Return the sizes of the bank of the typical MoE layer."""
    architecture = setting.architecture
    layer = architecture.typical_moe_layer
    assert layer.experts is not None
    return banks.get(architecture.layers.index(layer), setting.bank(layer.experts))


def threshold(setting: Setting, layer: Layer, transfer: float, gamma: float = GAMMA) -> Saturation:
    """Return the threshold at the rate that its own number of tokens reaches, independent of the planned number.

    A few tokens are limited by memory, far below the rate of many, so a threshold at their rate would be too low. The
    iteration starts with the peak rate and lowers rate and tokens until they agree.
    """
    result = saturation_at(setting, layer, transfer, peak_flops_per_s(setting.hardware, setting.dtype).value, gamma)
    for _ in range(_MOST_ROUNDS):
        last, rate = result.tokens, _reached_rate(setting, layer, max(1, result.tokens))
        result = saturation_at(setting, layer, transfer, rate, gamma)
        if abs(result.tokens - last) <= last * ROUNDING / 10:
            break
    return result


def _reached_rate(setting: Setting, layer: Layer, tokens: int) -> float:
    """Return the average FLOP/s of a layer without attention scores: the rate for n · f."""
    seconds = _seconds(dataclasses.replace(setting, sequences=Sequences(tokens, 1)), layer)
    without_scores = seconds.total - seconds.attention_scores
    return tokens * flops_per_token(layer, setting.architecture.hidden) / without_scores


def least_memory_bytes(setting: Setting, home: str) -> float:
    """Return the least memory of asyncep on one device: resting weights, shards, activations, and one slot."""
    if home == "device":
        return resident_cost(setting).memory_bytes
    return resting_memory(setting, home).peak_bytes + least_bank_bytes(model_phases(setting, home))


def resting_memory(setting: Setting, home: str) -> DeviceMemory:
    """Return the bytes that every schedule needs: dense weights, staging buffers, activations."""
    shards = [
        largest_shard_bytes(setting.bank(layer.experts).home_bytes, layer.experts.count, setting.ranks)
        for layer in setting.architecture.layer_counts
        if layer.experts is not None
    ]
    buffers = home_named(home).staging_buffers
    return resting_bytes(setting.dense_bytes, shards, buffers, activations_bytes(setting))


def resting_bytes(
    dense_bytes: float, shard_bytes: Iterable[int], staging_buffers: int, activation_bytes: float = 0.0
) -> DeviceMemory:
    """Return the bytes that every schedule needs, for these shards.

    A staging buffer is as large as the largest shard.
    """
    return DeviceMemory(dense_bytes, float(staging_buffers * max(shard_bytes, default=0)), activation_bytes)


def device_shard_bytes(setting: Setting, layer: Layer, bank: BankSizes, home: str) -> int:
    """Return the bytes of the largest shard of a layer's `bank` if shards rest on the device; else 0."""
    if layer.experts is None or not home_named(home).keeps_shards_on_device:
        return 0
    return largest_shard_bytes(bank.home_bytes, layer.experts.count, _sharers(setting, home))


def _sharers(setting: Setting, home: str) -> int:
    """Return the number of ranks over which a bank is spread."""
    return setting.ranks if home_named(home).is_spread else 1


def read_in_place_bytes(setting: Setting, layer: Layer, bank: BankSizes, home: str) -> int:
    """Return the bytes that a slot lacks of a layer's bank, because every rank reads its own experts in the shard.

    Expert segments that are not lowered expert by expert need complete banks in their slots.
    """
    if layer.experts is None or not home_named(home).keeps_shards_on_device:
        return 0
    if bank.is_encoded:
        return 0  # the complete bank is decoded
    matrices = mlp_parameters(setting.architecture.hidden, layer.experts.width, layer.experts.gated)
    nbytes = layer.experts.count * matrices * element_bytes(setting.dtype)  # slots hold all biases
    return smallest_shard_bytes(nbytes, layer.experts.count, _sharers(setting, home))


def streaming_execution(setting: Setting, home: str, bank: BankSizes | None = None) -> ExecutionModel:
    """Return how copies and computation act together, averaged over the model's layers.

    `bank` has the sizes of a copied bank, if known better than from the setting.
    """
    kinds = [(count, _seconds(setting, layer)) for layer, count in setting.architecture.layer_counts.items()]
    total = sum(count * seconds.total for count, seconds in kinds)
    passes = sum(count * (seconds.attention_passes + seconds.mlp_passes) for count, seconds in kinds)
    copied = typical_bank(setting) if bank is None else bank
    return execution_with_copies(setting.hardware, home, setting.transport, copied, passes / total)


def execution_with_copies(
    hardware: Hardware, home: str, transport: str, bank: BankSizes, memory_share: float
) -> ExecutionModel:
    """Return how computation and the copies of `bank`, with its decoding, act together.

    Copies slow GEMMs and memory traffic down by different factors. They are averaged, with `memory_share` as the
    fraction of computing time that is memory traffic. An emulated link is busy for longer than it copies, and slows
    nothing down while it waits, so the slowdown is averaged over that time too.
    """
    overlap = hardware.overlap
    slowdown = overlap.gemm.value * (1 - memory_share) + overlap.memory.value * memory_share
    on_host = hardware.device_kind == "cpu"
    true = without_emulation(hardware)
    filling = fill_seconds(hardware, bank, home, transport)
    copying = fill_seconds(true, bank, home, transport)
    if on_host and transport == PULL:
        # A CPU makes one copy after the other; devices have a copy engine for each link.
        # A decoder that is slower than the memory leaves the computation a part of its bandwidth.
        moving = memory_seconds(true, bank.link_bytes + bank.slot_bytes) if bank.is_encoded else 0.0
        copying = max(sum(link_seconds(true, bank.link_bytes, home)), min(decode_seconds(true, bank), moving))
    copied_fraction = min(1.0, copying / filling) if filling else 0.0
    return ExecutionModel(
        copy_slowdown=1.0 + max(0.0, slowdown - 1.0) * copied_fraction,
        host_runs_ahead=not on_host,
        fills_ahead=transport != COLLECTIVE,
    )


def _seconds(setting: Setting, layer: Layer) -> LayerSeconds:
    return layer_seconds(setting.hardware, layer, setting.architecture.hidden, setting.sequences, setting.dtype)


def saturation_at(setting: Setting, layer: Layer, transfer: float, rate: float, gamma: float) -> Saturation:
    """Return the saturation threshold of `layer` at `rate` FLOP/s."""
    return saturation(
        layer,
        setting.architecture.hidden,
        transfer_seconds=transfer,
        flops_per_s=rate,
        gamma=gamma,
        sequence=setting.sequences.length,
    )
