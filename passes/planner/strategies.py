"""Seconds and memory of a step under each strategy: the comparison that explain shows.

A step is `Setting.sequences` on each of N ranks. A strategy that splits every sequence over all ranks runs N such
steps, one for each rank's sequences, so that all strategies do equal work. Routing is assumed to be even, and kernels
to be the same everywhere. What differs is what is exchanged, how often weights are read, and who waits for whom.

All sequences of a step are computed at once. Only a pipeline cuts them into micro-batches. With `Setting.engine_tokens`
every strategy runs as serving engines run it: micro-batch by micro-batch, and a long sequence in chunks. Ranks with
sequences of their own (dp) are then at different chunks, and at every layer all wait for the rank with the longest
prefix.
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
from moepass.passes.ir.decisions import ASYNCEP, RESIDENT
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

# [Empirical] Tokens of a micro-batch: between the 2048 and 8192 tokens that serving engines schedule at
# once by default. Smaller ones read experts more often than they compute on them, larger ones need more memory.
MICRO_BATCH_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class StrategyCost:
    """`step_seconds` for the sequences of all ranks; bytes per device.

    `communication_bytes` are those of a typical layer with experts, by the table of arXiv 2605.02960; nothing hides
    them. `background_bytes` are those of its experts that come beside the computation, where they are streamed.
    """

    strategy: str
    step_seconds: float
    communication_bytes: float
    memory_bytes: float
    fits: bool
    background_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The subject of a comparison: one model on one machine. `budget_bytes` of memory may be used on each device.

    `dtype` is what GEMMs are computed in. With `stored` weights rest and travel as a checkpoint stores them, and
    every strategy computes from that; None: they rest in `dtype`.
    `engine_tokens` are those of a micro-batch of every strategy but asyncep; None: only pipelines have micro-batches.
    `transport` is how ranks exchange the shards of banks.
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
        return self.hardware.ranks

    @property
    def dense_bytes(self) -> int:
        """Weights without the banks."""
        return dense_bytes(self.architecture, self.dtype, self.stored)

    def bank(self, experts: Experts) -> BankSizes:
        return bank_sizes(experts, self.architecture.hidden, self.dtype, self.stored)

    def row_bytes(self, tokens: float) -> float:
        """Hidden states of that many tokens."""
        return tokens * self.architecture.hidden * element_bytes(activation_dtype(self.dtype))

    def collective(self, kind: str, nbytes: float) -> float:
        return collective_seconds(self.hardware, kind, nbytes)


def homes_of(setting: Setting) -> tuple[str, ...]:
    """Where experts may rest on this machine, the simplest first."""
    candidates = [home for home in HOMES.values() if home.is_candidate]
    return tuple(home.name for home in candidates if setting.ranks > 1 or not home.is_spread)


def compare_strategies(setting: Setting) -> tuple[StrategyCost, ...]:
    """Every strategy but asyncep, in the order of the table. On one device they differ from the resident one by
    micro-batches alone (pp_pp).

    Raises InputError for a dtype that the machine has no rate for.
    """
    return tuple(strategy_cost(setting, name) for name in STRATEGIES if name != ASYNCEP)


def resident_cost(setting: Setting) -> StrategyCost:
    """All experts of all layers on every device: no exchange at all, where that much memory is there."""
    seconds = _over_layers(setting, lambda layer: _layer(setting, layer).total) + _head(setting)
    weights = setting.dense_bytes + banks_bytes(setting)
    memory = weights + activations_bytes(setting)
    return StrategyCost(RESIDENT, seconds, 0.0, memory, memory <= setting.budget_bytes)


def strategy_cost(setting: Setting, name: str) -> StrategyCost:
    """A strategy of the table, but asyncep. Raises InputError as `compare_strategies`, KeyError for another name."""
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


def _rounds(setting: Setting, parts: Sequence[Sequences]) -> float:
    """How often `parts` are computed until all sequences of one rank are."""
    return setting.sequences.tokens / sum(part.tokens for part in parts)


def _layer(setting: Setting, layer: Layer, sequences: Sequences | None = None, **split: int) -> LayerSeconds:
    sequences = sequences or setting.sequences
    return layer_seconds(setting.hardware, layer, setting.architecture.hidden, sequences, setting.dtype, Split(**split))


# ---- Seconds of one layer for the sequences of all ranks -------------------------------------------------------------
# Exchanges are those that carry each hidden state once: a device that holds 1/N of the tokens sends those alone.


def _dp_ep(setting: Setting, layer: Layer) -> float:
    if layer.experts is None:
        return _layer(setting, layer).total
    computing = _layer(setting, layer, experts=setting.ranks).total
    return computing + _exchange(setting, layer, setting.sequences.tokens)


def _dp_tp(setting: Setting, layer: Layer) -> float:
    sequences, ranks = setting.sequences, setting.ranks
    everybody = dataclasses.replace(sequences, count=sequences.count * ranks)
    computing = _layer(setting, layer).attention + _layer(setting, layer, everybody, widths=ranks).mlp
    return computing + _gather_and_scatter(setting, everybody.tokens)


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
    """One rank's share of the tokens of one step; a sequence may be cut, which changes the cost of scores alone."""
    return _layer(setting, layer, Sequences(1, math.ceil(setting.sequences.tokens / setting.ranks)), experts=experts)


def _exchange(setting: Setting, layer: Layer, tokens: float) -> float:
    """Dispatch and combine of `tokens` on each device, top_k times each."""
    assert layer.experts is not None
    rows = layer.experts.top_k * setting.row_bytes(tokens)
    return token_exchange_seconds(setting.hardware, rows, layer.experts.count)


def _gather_and_scatter(setting: Setting, tokens: float) -> float:
    """All hidden states to all devices, and the sums of what these make of them back to where each belongs."""
    nbytes = setting.row_bytes(tokens)
    return setting.collective("all_gather", nbytes) + setting.collective("reduce_scatter", nbytes)


def _key_values(setting: Setting, layer: Layer) -> float:
    """Keys and values of the whole sequence to every device that holds a part of it."""
    nbytes = kv_bytes(
        layer.attention, setting.sequences.count, setting.sequences.length, activation_dtype(setting.dtype)
    )
    return setting.collective("all_gather", float(nbytes))


# Each rank computes attention over sequences of its own.
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
    """Layers shared out in order; the device with the most layers sets the pace, and sends its output to the next."""
    share = math.ceil(len(setting.architecture.layers) / setting.ranks) / len(setting.architecture.layers)
    parts = _parts(setting)
    seconds = []
    for part in parts:
        computing = _over_layers(setting, lambda layer, part=part: _layer(setting, layer, part).total)  # type: ignore[misc]
        # The layer's output and the residual stream are sent one after the other, as in vLLM.
        seconds.append(share * computing + 2 * setting.collective("p2p", setting.row_bytes(part.tokens)))
    return setting.ranks * _rounds(setting, parts) * pipeline_seconds(seconds, setting.ranks) + _head(setting)


def _parts(setting: Setting) -> tuple[Sequences, ...]:
    """The micro-batches of one round: of no more tokens than all ranks have in a step."""
    tokens = min(setting.engine_tokens or MICRO_BATCH_TOKENS, setting.ranks * setting.sequences.tokens)
    return micro_batches(setting.sequences.length, tokens)


def _micro_batched(setting: Setting, name: str) -> float:
    """Micro-batches one after the other; data-parallel ranks wait for the slowest of them."""
    parts = _parts(setting)
    steps = [dataclasses.replace(setting, sequences=part) for part in parts]
    seconds = sum(_over_layers(step, functools.partial(_SECONDS[name], step)) for step in steps)
    if name in _DATA_PARALLEL:
        attention = [_over_layers(step, lambda layer, step=step: _layer(step, layer).attention) for step in steps]  # type: ignore[misc]
        seconds += len(parts) * slowest_seconds(attention, setting.ranks) - sum(attention)
    return _rounds(setting, parts) * seconds + _head(setting)


# ---- Memory of one device --------------------------------------------------------------------------------------------


def banks_bytes(setting: Setting) -> int:
    """Bytes of all experts of all layers, where they rest."""
    return sum(
        count * setting.bank(layer.experts).home_bytes
        for layer, count in setting.architecture.layer_counts.items()
        if layer.experts is not None
    )


def activations_bytes(setting: Setting, tokens: float | None = None) -> float:
    """The most that activations of `tokens`, all of a rank's by default, take at once in any layer."""
    tokens = setting.sequences.tokens if tokens is None else tokens
    return peak_activation_bytes(setting.architecture, tokens, setting.dtype)


def peak_activation_bytes(architecture: Architecture, tokens: float, dtype: str) -> float:
    """The most that activations of `tokens` take at once in any layer, where weights are `dtype`."""
    wide = activation_dtype(dtype)
    return max(float(activation_bytes(layer, architecture.hidden, tokens, wide)) for layer in architecture.layer_counts)


def _memory(setting: Setting, name: str) -> float:
    """Weights, the activations of the tokens that a device has, and keys and values of chunks where there are any."""
    ranks, tokens = setting.ranks, setting.sequences.tokens
    dense, banks = setting.dense_bytes, banks_bytes(setting)
    parts = _parts(setting)
    kept = max(part.count * (part.prefix + part.length) for part in parts)
    kept_bytes = float(model_kv_bytes(setting.architecture, 1, kept, activation_dtype(setting.dtype)))
    if name == "pp_pp":
        share = math.ceil(len(setting.architecture.layers) / ranks) / len(setting.architecture.layers)
        # N micro-batches are under way, each with the keys and values of a device's layers.
        return share * (dense + banks + ranks * kept_bytes) + activations_bytes(setting, parts[0].tokens)
    if setting.engine_tokens is None:
        kept_bytes = 0.0
    else:
        tokens = parts[0].tokens
        kept_bytes /= 1 if name in _DATA_PARALLEL else ranks
    sharded = name in ("tp_tp", "tp_ep")
    weights = (dense + banks) / ranks if sharded else dense + banks / ranks
    everybody = tokens * ranks if name == "dp_tp" else tokens
    divisor = ranks if name in ("sp_ep", "tp_ep") else 1
    return weights + kept_bytes + activations_bytes(setting, everybody / divisor)
