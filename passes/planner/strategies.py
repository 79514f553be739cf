"""Seconds and memory of a step under each strategy: the comparison that `explain` shows.

A step is `Setting.sequences` on each of N ranks. A strategy that splits every sequence over all ranks runs N such
steps, one for each rank's sequences, so that all strategies do equal work. Routing is assumed to be even, and kernels
to be the same everywhere. Strategies differ in their exchanges, in how often they read weights, and in their waits.

All sequences of a step are computed at once. Only a pipeline cuts them into micro-batches. With `Setting.engine_tokens`
every strategy runs as in serving engines: micro-batch by micro-batch, with long sequences in chunks. Data-parallel
ranks (dp) are then at different chunks, and in every layer all ranks wait for the one with the longest prefix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from moepass.models.formulas.communication import STRATEGIES, communication_bytes
from moepass.models.formulas.memory import activation_bytes, element_bytes, kv_bytes, model_kv_bytes
from moepass.models.formulas.stored_weights import BankSizes, bank_sizes, dense_bytes
from moepass.models.homes import HOMES
from moepass.models.sizes.architecture import Architecture, Experts, Layer
from moepass.models.sizes.weight_formats import WeightFormat
from moepass.passes.ir.planner_decisions import ASYNCEP, RESIDENT
from moepass.passes.machine.hardware import Hardware
from moepass.passes.machine.layer_times import (
    LayerSeconds,
    Sequences,
    Split,
    activation_dtype,
    head_seconds,
    layer_seconds,
)
from moepass.passes.machine.times import collective_seconds, token_exchange_seconds
from moepass.passes.planner.microbatches import micro_batches, pipeline_seconds, slowest_seconds

# [Empirical] Tokens of a micro-batch, between the 2048 and 8192 that serving engines schedule at once by default.
# Smaller micro-batches spend more time reading experts than computing with them; larger ones need more memory.
MICRO_BATCH_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class StrategyCost:
    """Seconds of a step for the sequences of all ranks, and bytes per device.

    Attributes:
        communication_bytes: exposed bytes of a typical MoE layer, by the table of arXiv 2605.02960
        background_bytes: bytes of its experts that are streamed during computation
    """

    strategy: str
    step_seconds: float
    communication_bytes: float
    memory_bytes: float
    fits: bool
    background_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The subject of a comparison: one model on one machine.

    Attributes:
        dtype: dtype of GEMMs
        budget_bytes: memory that may be used on each device
        engine_tokens: size of a micro-batch in tokens, for all strategies except asyncep; with None, only pipelines use
            micro-batches
        stored: storage format of the weights at rest and in transfers; None means `dtype`
        transport: how ranks exchange the shards of banks
    """

    architecture: Architecture
    hardware: Hardware
    sequences: Sequences
    dtype: str
    budget_bytes: float
    engine_tokens: int | None = None
    stored: WeightFormat | None = None
    transport: str = "pull"

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.hardware.ranks

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights without the banks."""
        return dense_bytes(self.architecture, self.dtype, self.stored)

    def bank(self, experts: Experts) -> BankSizes:
        """Return the sizes of the bank of a layer with these experts."""
        return bank_sizes(experts, self.architecture.hidden, self.dtype, self.stored)

    def row_bytes(self, tokens: float) -> float:
        """Return the bytes of the hidden states of `tokens`."""
        return tokens * self.architecture.hidden * element_bytes(activation_dtype(self.dtype))

    def collective(self, kind: str, nbytes: float) -> float:
        """Return the seconds of a collective on this machine."""
        return collective_seconds(self.hardware, kind, nbytes)


def homes_of(setting: Setting) -> tuple[str, ...]:
    """Return the homes that experts can have on this machine, the simplest first."""
    candidates = [home for home in HOMES.values() if home.is_candidate]
    return tuple(home.name for home in candidates if setting.ranks > 1 or not home.is_spread)


def compare_strategies(setting: Setting) -> tuple[StrategyCost, ...]:
    """Return the costs of all strategies except asyncep, in the order of the table.

    On a single device they differ from the resident strategy only by micro-batches (pp_pp). Raises InputError for a
    dtype without a rate.
    """
    return tuple(strategy_cost(setting, name) for name in STRATEGIES if name != ASYNCEP)


def resident_cost(setting: Setting) -> StrategyCost:
    """Return the cost of all experts on every device, without exchanges."""
    seconds = _over_layers(setting, lambda layer: _layer(setting, layer).total) + _head(setting)
    # Kernels read experts as they are in a slot.
    weights = setting.dense_bytes + banks_bytes(setting, in_slots=True)
    memory = weights + activations_bytes(setting)
    return StrategyCost(RESIDENT, seconds, 0.0, memory, memory <= setting.budget_bytes)


def strategy_cost(setting: Setting, name: str) -> StrategyCost:
    """Return the cost of one strategy of the table, except asyncep.

    Raises the InputErrors of `compare_strategies`, and KeyError for any other name.
    """
    if name == "pp_pp":
        seconds = _pipeline(setting)
    elif setting.engine_tokens is None:
        seconds = _over_layers(setting, functools.partial(_SECONDS[name], setting)) + _head(setting)
    else:
        seconds = _micro_batched(setting, name)
    memory = _memory(setting, name)
    moved = communication_bytes(
        name,
        setting.architecture.typical_moe_layer,
        setting.architecture.hidden,
        setting.sequences.tokens,
        setting.ranks,
        activation_dtype(setting.dtype),
    )
    return StrategyCost(name, seconds, float(moved), memory, memory <= setting.budget_bytes)


def _over_layers(setting: Setting, seconds: Callable[[Layer], float]) -> float:
    return sum(count * seconds(layer) for layer, count in setting.architecture.layer_counts.items())


def _head(setting: Setting) -> float:
    return head_seconds(setting.hardware, setting.architecture, setting.sequences, setting.dtype)


def _rounds(setting: Setting, round_sequences: Sequence[Sequences]) -> float:
    """Return how often `round_sequences` are computed until all sequences of one rank are done."""
    return setting.sequences.tokens / sum(batch.tokens for batch in round_sequences)


def _layer(setting: Setting, layer: Layer, sequences: Sequences | None = None, **split: int) -> LayerSeconds:
    sequences = sequences or setting.sequences
    return layer_seconds(setting.hardware, layer, setting.architecture.hidden, sequences, setting.dtype, Split(**split))


# ---- Seconds of one layer for the sequences of all ranks -------------------------------------------------------------
# Each hidden state is exchanged once: a device that holds 1/N of the tokens sends only these.


def _dp_ep(setting: Setting, layer: Layer) -> float:
    if layer.experts is None:
        return _layer(setting, layer).total
    computing = _layer(setting, layer, experts=setting.ranks).total
    return computing + _exchange(setting, layer, setting.sequences.tokens)


def _dp_tp(setting: Setting, layer: Layer) -> float:
    sequences, ranks = setting.sequences, setting.ranks
    all_sequences = dataclasses.replace(sequences, count=sequences.count * ranks)
    computing = _layer(setting, layer).attention + _layer(setting, layer, all_sequences, widths=ranks).mlp
    return computing + _gather_and_scatter(setting, all_sequences.tokens)


def _tp_tp(setting: Setting, layer: Layer) -> float:
    ranks = setting.ranks
    computing = _layer(setting, layer, attention=ranks, widths=ranks).total
    return ranks * (computing + 2 * setting.collective("all_reduce", setting.row_bytes(setting.sequences.tokens)))


def _tp_ep(setting: Setting, layer: Layer) -> float:
    if layer.experts is None:
        return _tp_tp(setting, layer)
    ranks, tokens = setting.ranks, setting.sequences.tokens
    computing = _layer(setting, layer, attention=ranks).attention + _share(setting, layer, experts=ranks).mlp
    exchanging = _gather_and_scatter(setting, tokens) + _exchange(setting, layer, tokens / ranks)
    return ranks * (computing + exchanging)


def _sp_tp(setting: Setting, layer: Layer) -> float:
    ranks, tokens = setting.ranks, setting.sequences.tokens
    computing = _layer(setting, layer, attention=ranks).attention + _layer(setting, layer, widths=ranks).mlp
    return ranks * (computing + _key_values(setting, layer) + _gather_and_scatter(setting, tokens))


def _sp_ep(setting: Setting, layer: Layer) -> float:
    ranks, tokens = setting.ranks, setting.sequences.tokens
    computing = _layer(setting, layer, attention=ranks).attention + _share(setting, layer, experts=ranks).mlp
    exchanging = _exchange(setting, layer, tokens / ranks) if layer.experts is not None else 0.0
    return ranks * (computing + _key_values(setting, layer) + exchanging)


def _share(setting: Setting, layer: Layer, experts: int) -> LayerSeconds:
    """Return the seconds of one rank's share of a step.

    It may cut a sequence, which changes only the cost of scores.
    """
    return _layer(setting, layer, Sequences(1, math.ceil(setting.sequences.tokens / setting.ranks)), experts=experts)


def _exchange(setting: Setting, layer: Layer, tokens: float) -> float:
    """Return the seconds of dispatch and combine of `tokens` on each device, top_k times each."""
    assert layer.experts is not None
    rows = layer.experts.top_k * setting.row_bytes(tokens)
    return token_exchange_seconds(setting.hardware, rows, layer.experts.count)


def _gather_and_scatter(setting: Setting, tokens: float) -> float:
    """Return the seconds of gathering all hidden states on all devices, and of reducing and scattering the results."""
    nbytes = setting.row_bytes(tokens)
    return setting.collective("all_gather", nbytes) + setting.collective("reduce_scatter", nbytes)


def _key_values(setting: Setting, layer: Layer) -> float:
    """Return the seconds of gathering keys and values of the whole sequence on every device."""
    nbytes = kv_bytes(
        layer.attention, setting.sequences.count, setting.sequences.length, activation_dtype(setting.dtype)
    )
    return setting.collective("all_gather", float(nbytes))


# Strategies in which each rank computes attention over different sequences.
_DATA_PARALLEL = ("dp_ep", "dp_tp")

_SECONDS: dict[str, Callable[[Setting, Layer], float]] = {
    "dp_ep": _dp_ep,
    "dp_tp": _dp_tp,
    "tp_ep": _tp_ep,
    "tp_tp": _tp_tp,
    "sp_tp": _sp_tp,
    "sp_ep": _sp_ep,
}


def _pipeline(setting: Setting) -> float:
    """Return the seconds of a pipeline.

    The device with the most layers sets the pace, and sends its output to the next.
    """
    share = math.ceil(len(setting.architecture.layers) / setting.ranks) / len(setting.architecture.layers)
    batches = _micro_batches(setting)
    seconds = []
    for batch in batches:
        computing = _over_layers(setting, lambda layer, batch=batch: _layer(setting, layer, batch).total)  # type: ignore[misc]
        # The layer's output and the residual stream are sent one after the other, as in vLLM.
        seconds.append(share * computing + 2 * setting.collective("p2p", setting.row_bytes(batch.tokens)))
    return setting.ranks * _rounds(setting, batches) * pipeline_seconds(seconds, setting.ranks) + _head(setting)


def _micro_batches(setting: Setting) -> tuple[Sequences, ...]:
    """Return the micro-batches of one round. None has more tokens than all ranks together have in a step."""
    tokens = min(setting.engine_tokens or MICRO_BATCH_TOKENS, setting.ranks * setting.sequences.tokens)
    return micro_batches(setting.sequences.length, tokens)


def _micro_batched(setting: Setting, name: str) -> float:
    """Return the seconds of successive micro-batches; data-parallel ranks wait for the slowest."""
    batches = _micro_batches(setting)
    steps = [dataclasses.replace(setting, sequences=batch) for batch in batches]
    seconds = sum(_over_layers(step, functools.partial(_SECONDS[name], step)) for step in steps)
    if name in _DATA_PARALLEL:
        attention = [_over_layers(step, lambda layer, step=step: _layer(step, layer).attention) for step in steps]  # type: ignore[misc]
        seconds += len(batches) * slowest_seconds(attention, setting.ranks) - sum(attention)
    return _rounds(setting, batches) * seconds + _head(setting)


# ---- Memory of one device --------------------------------------------------------------------------------------------


def banks_bytes(setting: Setting, *, in_slots: bool = False) -> int:
    """Return the bytes of all experts of all layers: at rest, or as kernels read them in slots."""
    total = 0
    for layer, count in setting.architecture.layer_counts.items():
        if layer.experts is not None:
            sizes = setting.bank(layer.experts)
            total += count * (sizes.slot_bytes if in_slots else sizes.home_bytes)
    return total


def activations_bytes(setting: Setting, tokens: float | None = None) -> float:
    """Return the peak activation bytes of any layer for `tokens`, by default all of a rank's."""
    tokens = setting.sequences.tokens if tokens is None else tokens
    return peak_activation_bytes(setting.architecture, tokens, setting.dtype)


def peak_activation_bytes(architecture: Architecture, tokens: float, dtype: str) -> float:
    """Return the peak activation bytes of any layer for `tokens`, with weights of `dtype`."""
    wide = activation_dtype(dtype)
    return max(float(activation_bytes(layer, architecture.hidden, tokens, wide)) for layer in architecture.layer_counts)


def _memory(setting: Setting, name: str) -> float:
    """Return the bytes of weights, of the activations of a device's tokens, and of keys and values of chunks."""
    ranks, tokens = setting.ranks, setting.sequences.tokens
    dense, banks = setting.dense_bytes, banks_bytes(setting)
    batches = _micro_batches(setting)
    cached = max(batch.count * (batch.prefix + batch.length) for batch in batches)
    cache_bytes = float(model_kv_bytes(setting.architecture, 1, cached, activation_dtype(setting.dtype)))
    if name == "pp_pp":
        share = math.ceil(len(setting.architecture.layers) / ranks) / len(setting.architecture.layers)
        # N micro-batches are in flight, each with the keys and values of a device's layers.
        return share * (dense + banks + ranks * cache_bytes) + activations_bytes(setting, batches[0].tokens)
    if setting.engine_tokens is None:
        cache_bytes = 0.0
    else:
        tokens = batches[0].tokens
        cache_bytes /= 1 if name in _DATA_PARALLEL else ranks
    sharded = name in ("tp_tp", "tp_ep")
    weights = (dense + banks) / ranks if sharded else dense + banks / ranks
    mlp_tokens = tokens * ranks if name == "dp_tp" else tokens
    divisor = ranks if name in ("sp_ep", "tp_ep") else 1
    return weights + cache_bytes + activations_bytes(setting, mlp_tokens / divisor)
