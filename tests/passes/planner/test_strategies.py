"""The strategies that asyncep is compared with: exchanged bytes, memory, and the effect of bandwidth."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.formulas.memory import bank_bytes, resident_bytes
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer
from moepass.models.sizes.presets import preset
from moepass.passes.machine.hardware import Figure, Hardware, with_ranks
from moepass.passes.machine.layer_times import Sequences
from moepass.passes.machine.times import memory_seconds
from moepass.passes.planner.strategies import (
    Setting,
    activations_bytes,
    banks_bytes,
    compare_strategies,
    resident_cost,
    strategy_cost,
)
from moepass.runtime.profiles.hardware_profiles import load_hardware

H100 = load_hardware("8xh100-80g")
QWEN = preset("qwen3-235b-a22b")
NAMES = ("dp_ep", "dp_tp", "tp_ep", "tp_tp", "pp_pp", "sp_tp", "sp_ep")
SMALL = Architecture(
    "small",
    "small",
    hidden=1024,
    vocab=1000,
    dtype="bf16",
    layers=(Layer(Attention("full", 8, 8, 128, 128), None, 4096),)
    + (Layer(Attention("full", 8, 8, 128, 128), Experts(16, 2, 512), None),) * 3,
)


def _setting(
    architecture: Architecture = SMALL, hardware: Hardware = H100, batch: int = 4, sequence: int = 2048
) -> Setting:
    return Setting(architecture, hardware, Sequences(batch, sequence), "bf16", 72e9)


def _with_peer_rate(hardware: Hardware, factor: float) -> Hardware:
    assert hardware.peer is not None
    rate = Figure(hardware.peer.bytes_per_s.value * factor, "user")
    return dataclasses.replace(hardware, peer=dataclasses.replace(hardware.peer, bytes_per_s=rate))


def test_bytes_between_devices_are_those_of_the_table() -> None:
    tokens, ranks, row = 65536, 8, 4096 * 2
    costs = {
        cost.strategy: cost.communication_bytes for cost in compare_strategies(_setting(QWEN, batch=16, sequence=4096))
    }
    share, key_values = (ranks - 1) / ranks, 2 * 4 * 128 * 2
    assert costs == pytest.approx(
        {
            "dp_ep": 4 * 8 * share * tokens * row,
            "dp_tp": 4 * share * tokens * row,
            "tp_ep": (2 + 4 * 8) * share * tokens * row,
            "tp_tp": 4 * share * tokens * row,
            "pp_pp": 2 * tokens * row,
            "sp_tp": share * tokens * (key_values + 4 * row),
            "sp_ep": share * tokens * (key_values + 4 * 8 * row),
        }
    )


def test_memory_adds_up() -> None:
    setting = _setting()
    dense, banks = resident_bytes(SMALL, "bf16"), 3 * bank_bytes(SMALL.typical_moe_layer.experts, 1024, "bf16")  # type: ignore[arg-type]
    assert banks_bytes(setting) == banks
    tokens = setting.sequences.tokens
    assert resident_cost(setting).memory_bytes == dense + banks + activations_bytes(setting, tokens)
    memory = {cost.strategy: cost.memory_bytes for cost in compare_strategies(setting)}
    assert memory["dp_ep"] == dense + banks / 8 + activations_bytes(setting, tokens)
    assert memory["dp_tp"] == dense + banks / 8 + activations_bytes(setting, 8 * tokens)
    assert memory["tp_tp"] == (dense + banks) / 8 + activations_bytes(setting, tokens)
    assert memory["tp_ep"] == (dense + banks) / 8 + activations_bytes(setting, tokens / 8)
    assert memory["sp_ep"] == dense + banks / 8 + activations_bytes(setting, tokens / 8)


def test_strategies_that_do_not_fit_have_a_reason() -> None:
    setting = _setting()
    needed = resident_cost(setting).memory_bytes
    for budget, fits in ((needed, True), (needed - 1, False)):
        assert resident_cost(dataclasses.replace(setting, budget_bytes=budget)).fits is fits


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 16), st.integers(64, 8192), st.floats(1.0, 16.0), st.sampled_from(NAMES))
def test_more_bandwidth_is_never_slower(batch: int, sequence: int, factor: float, name: str) -> None:
    slow = strategy_cost(_setting(batch=batch, sequence=sequence), name)
    fast = strategy_cost(_setting(hardware=_with_peer_rate(H100, factor), batch=batch, sequence=sequence), name)
    assert fast.step_seconds <= slow.step_seconds
    assert fast.memory_bytes == slow.memory_bytes


def test_exchanges_on_an_infinite_link_cost_only_latency() -> None:
    endless = dataclasses.replace(
        _with_peer_rate(H100, 1e9), collective_latency_seconds=Figure(0.0, "user", "for this test")
    )
    setting = _setting(QWEN, endless, 16, 4096)
    resident = resident_cost(setting).step_seconds
    # Arrived rows are sorted by expert and back in every layer.
    row_bytes = 8 * 4096 * 2
    regrouping = 94 * memory_seconds(endless, 16 * 4096 * row_bytes * 4)
    # Fewer experts with the same rows each are no slower than all experts on one device.
    assert resident * 0.9 <= strategy_cost(setting, "dp_ep").step_seconds - regrouping <= resident


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"pp_pp"}))
def test_one_device_has_nothing_to_share(name: str) -> None:
    setting = _setting(hardware=with_ranks(H100, 1))
    assert strategy_cost(setting, name).step_seconds == pytest.approx(resident_cost(setting).step_seconds)


def test_a_pipeline_of_one_device_is_sequential() -> None:
    # Sequences of 4096 tokens are micro-batches of themselves; only reading weights once per micro-batch costs more.
    setting = _setting(QWEN, with_ranks(H100, 1), 16, 4096)
    pipelined, at_once = strategy_cost(setting, "pp_pp").step_seconds, resident_cost(setting).step_seconds
    assert at_once <= pipelined <= 1.3 * at_once


@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 20)])
def test_a_pipeline_has_no_more_tokens_than_the_step(batch: int, sequence: int) -> None:
    """Every rank computes its layers for the step's tokens at least once, even if there are few tokens."""
    setting = _setting(QWEN, batch=batch, sequence=sequence)
    everybody = dataclasses.replace(setting, sequences=Sequences(8 * batch, sequence))
    assert strategy_cost(setting, "pp_pp").step_seconds >= resident_cost(everybody).step_seconds / 8
    few = _setting(QWEN, batch=2 * batch, sequence=sequence)
    assert strategy_cost(setting, "pp_pp").memory_bytes < strategy_cost(few, "pp_pp").memory_bytes


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_computes_short_texts_in_micro_batches(name: str) -> None:
    """One step of 16384 tokens becomes four of 4096, which a pipeline has anyway."""
    at_once = _setting(QWEN, batch=16, sequence=1024)
    cut, single = (dataclasses.replace(_setting(QWEN, batch=n, sequence=1024), engine_tokens=4096) for n in (16, 4))
    cost = strategy_cost(cut, name)
    assert cost.step_seconds == pytest.approx(4 * strategy_cost(single, name).step_seconds, rel=1e-3)
    assert cost.memory_bytes == strategy_cost(single, name).memory_bytes
    if name == "pp_pp":
        assert cost == strategy_cost(at_once, name)
    else:
        assert cost.step_seconds > strategy_cost(at_once, name).step_seconds
        uncut = dataclasses.replace(single, engine_tokens=None)
        assert strategy_cost(single, name).step_seconds == pytest.approx(strategy_cost(uncut, name).step_seconds)


def test_only_data_parallel_ranks_are_at_chunks_of_their_own() -> None:
    """One device does not wait; on eight, ranks with the longest prefixes delay the others."""
    for name in ("dp_ep", "tp_tp"):
        seconds = {}
        for ranks in (1, 8):
            endless = dataclasses.replace(
                with_ranks(_with_peer_rate(H100, 1e9), ranks),
                collective_latency_seconds=Figure(0.0, "user", "for this test"),
                processors=None,
            )
            setting = dataclasses.replace(_setting(QWEN, endless, 1, 65536), engine_tokens=4096)
            seconds[ranks] = strategy_cost(setting, name).step_seconds
        if name == "dp_ep":
            assert seconds[8] > 1.3 * seconds[1]
        else:
            assert seconds[8] == pytest.approx(seconds[1], rel=0.1)


def test_an_engine_keeps_the_keys_and_values_of_chunks() -> None:
    setting = dataclasses.replace(_setting(QWEN, batch=1, sequence=65536), engine_tokens=4096)
    kv_bytes = 2 * 94 * 65536 * 4 * 128 * 2
    at_once = dataclasses.replace(_setting(QWEN, batch=1, sequence=4096), engine_tokens=4096)
    for name, share in (("dp_ep", 1), ("tp_ep", 8)):
        more = strategy_cost(setting, name).memory_bytes - strategy_cost(at_once, name).memory_bytes
        assert more == pytest.approx(kv_bytes * (1 - 1 / 16) / share)
