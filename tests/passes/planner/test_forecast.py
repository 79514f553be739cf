"""Forecasts: numbers that add up, a planner that says no, and every preset on the default machine."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError
from moepass.models.formulas.memory import bank_bytes, resident_bytes
from moepass.models.formulas.stored_weights import BankSizes
from moepass.models.homes import HOMES
from moepass.models.sizes.architecture import Architecture, Attention, Experts, Layer
from moepass.models.sizes.presets import preset, preset_names
from moepass.passes.machine.hardware import Conditions, Figure, Hardware, with_emulated_link, with_ranks
from moepass.passes.machine.layer_times import Sequences, head_seconds, layer_seconds
from moepass.passes.machine.seconds_table import table_of
from moepass.passes.machine.times import decode_seconds, gather_seconds
from moepass.passes.planner.forecast import (
    Forecast,
    crossover_tokens,
    curve_point,
    forecast,
    threshold_curve,
)
from moepass.passes.planner.model_problem import least_memory_bytes, model_phases, streaming_execution
from moepass.passes.planner.strategies import Setting, StrategyCost, activations_bytes, resident_cost
from moepass.passes.planner.verdict import reason
from moepass.runtime.profiles.hardware_profiles import load_hardware

H100 = load_hardware("8xh100-80g")
QWEN = preset("qwen3-235b-a22b")
MOE = Layer(Attention("full", 32, 8, 128, 128), Experts(64, 8, 1024), None)
DENSE = dataclasses.replace(MOE, experts=None, dense_width=8192)
SMALL = Architecture("small", "small", hidden=4096, vocab=32000, dtype="bf16", layers=(DENSE, *[MOE] * 5))


def _setting(
    architecture: Architecture = SMALL,
    hardware: Hardware = H100,
    batch: int = 8,
    sequence: int = 4096,
    budget: float = 72e9,
    dtype: str = "bf16",
) -> Setting:
    return Setting(architecture, hardware, Sequences(batch, sequence), dtype, budget)


def _scarce(home: str, banks: float = 2.0, **changes: int) -> Setting:
    """Return a setting with memory for `banks` banks in addition to the bytes that are always on the device."""
    setting = _setting(**changes)  # type: ignore[arg-type]
    bank = bank_bytes(MOE.experts, 4096, "bf16")  # type: ignore[arg-type]
    return dataclasses.replace(setting, budget_bytes=least_memory_bytes(setting, home) + (banks - 1) * bank)


def test_stages_are_the_layers_with_their_banks() -> None:
    setting = _setting()
    phases = model_phases(setting, "peer")
    bank = bank_bytes(MOE.experts, 4096, "bf16")  # type: ignore[arg-type]
    assert [phase.bank_bytes for phase in phases] == [0, 0, *[0, bank] * 5, 0]
    assert {phase.transfer_seconds for phase in phases} == {0.0, gather_seconds(H100, bank, "peer")}
    layers = [layer_seconds(H100, layer, 4096, setting.sequences, "bf16").total for layer in SMALL.layers]
    total = sum(layers) + head_seconds(H100, SMALL, setting.sequences, "bf16")
    assert sum(phase.compute_seconds for phase in phases) == pytest.approx(total)


def test_a_saturated_step_is_as_fast_as_with_resident_experts() -> None:
    setting = _scarce("peer", batch=32)
    made = forecast(setting, "peer")
    assert made.simulation is not None
    assert made.setting.sequences.tokens > made.saturation.tokens
    assert made.simulation.exposed_seconds == 0
    alone = resident_cost(setting).step_seconds
    assert alone <= made.simulation.step_seconds <= 1.02 * alone  # copies slow memory passes down
    assert made.chosen == "asyncep"
    assert "hides all transfers" in made.reason


def test_the_planner_says_no() -> None:
    setting = _scarce("peer", batch=1, sequence=64)
    made = forecast(setting, "peer")
    assert made.simulation is not None
    assert made.chosen not in ("asyncep", "resident")
    assert made.cost(made.chosen).step_seconds < made.cost("asyncep").step_seconds
    assert "asyncep would wait" in made.reason
    # The link is the bottleneck: the step takes the time of the streamed bytes.
    assert made.schedule is not None
    assert made.simulation.step_seconds >= len(made.schedule.order) * made.fill_seconds


def test_a_reason_names_the_memory_that_is_needed_if_nothing_fits() -> None:
    made = forecast(_setting(QWEN, batch=64, budget=20e9), "host")
    assert (made.simulation, made.mfu, made.runner_up) == (None, None, None)
    assert math.isinf(made.cost("asyncep").step_seconds)
    assert not any(cost.fits for cost in made.comparison)
    least = min(made.comparison, key=lambda cost: cost.memory_bytes)
    assert made.chosen == least.strategy
    assert made.reason == (
        f"no strategy fits the memory budget; {least.strategy} needs the least memory, "
        f"{least.memory_bytes / 1e9:.1f} GB per device"
    )


def test_where_all_fits_nothing_moves() -> None:
    made = forecast(_setting(), "peer")
    assert made.chosen == "resident"
    assert "nothing moves" in made.reason


@pytest.mark.parametrize("home", ["peer", "hybrid", "host"])
def test_memory_adds_up_for_every_home(home: str) -> None:
    setting = _scarce(home, 3.5)
    made = forecast(setting, home)
    assert made.schedule is not None
    bank, dense = bank_bytes(MOE.experts, 4096, "bf16"), resident_bytes(SMALL, "bf16")  # type: ignore[arg-type]
    stay = len(made.schedule.resident) * bank
    # A resident bank is complete on every rank, and has no shard.
    shards = len(made.schedule.order) * bank / 8 if home == "peer" else 0
    assert made.memory.resident_bytes == dense + shards + stay
    staged = HOMES["hybrid"].staging_buffers * bank / 8 if home == "hybrid" else 0
    # With home `peer`, every rank reads its own experts from their home.
    slot = bank * 7 / 8 if home == "peer" else bank
    assert made.memory.slot_bytes == made.schedule.slots * slot + staged
    assert made.memory.activation_bytes == activations_bytes(setting)
    memory = made.memory
    total = memory.resident_bytes + memory.slot_bytes + memory.activation_bytes + memory.kv_bytes
    assert made.cost("asyncep").memory_bytes == memory.peak_bytes == total <= setting.budget_bytes
    assert len(made.schedule.resident) + len(made.schedule.order) == 5


def test_home_device_is_all_resident() -> None:
    made = forecast(_setting(), "device")
    assert made.schedule is not None
    assert (made.fill_seconds, made.schedule.slots, made.schedule.order) == (0.0, 0, ())
    assert made.memory.peak_bytes == pytest.approx(resident_cost(made.setting).memory_bytes)
    assert made.saturation.tokens == 0
    large = forecast(_setting(QWEN), "device")
    assert not large.cost("asyncep").fits
    assert large.reason.startswith("asyncep does not fit, ")


def test_a_second_slot_is_taken_where_it_costs_nothing() -> None:
    made = forecast(_scarce("peer", 2.0, batch=32), "peer")
    assert made.schedule is not None
    assert made.schedule.slots == 2
    with_one_slot = forecast(_scarce("peer", 2.0, batch=32), "peer", most_slots=1)
    assert with_one_slot.schedule is not None
    assert with_one_slot.schedule.slots == 1


def test_links_and_homes_that_are_not_there() -> None:
    with pytest.raises(InputError, match="has no disk link"):
        forecast(_setting(), "disk")
    with pytest.raises(InputError, match="has no peer link"):
        forecast(_setting(hardware=load_hardware("4xl40s")), "peer")
    with pytest.raises(InputError, match="home is 'moon'"):
        forecast(_setting(), "moon")
    dense = dataclasses.replace(SMALL, layers=(DENSE,))
    with pytest.raises(InputError, match="has no layer with experts"):
        forecast(_setting(dense), "host")


def _faster(hardware: Hardware, factor: float) -> Hardware:
    links = {}
    for name in ("peer", "host"):
        link = getattr(hardware, name)
        links[name] = dataclasses.replace(link, bytes_per_s=Figure(link.bytes_per_s.value * factor, "user"))
    return dataclasses.replace(hardware, **links)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 16),
    st.sampled_from([128, 1024, 4096]),
    st.floats(1.0, 8.0),
    st.floats(2.0, 5.0),
    st.sampled_from(["peer", "hybrid", "host"]),
)
def test_bandwidth_helps_and_computation_is_the_limit(
    batch: int, sequence: int, factor: float, banks: float, home: str
) -> None:
    setting = _scarce(home, banks, batch=batch, sequence=sequence)
    slow = forecast(setting, home)
    fast = forecast(dataclasses.replace(setting, hardware=_faster(H100, factor)), home)
    assert slow.simulation is not None
    assert fast.simulation is not None
    # The search's own bound is within 5 % of the best, so that two searches may differ by as much.
    assert fast.simulation.step_seconds <= 1.05 * slow.simulation.step_seconds
    assert fast.saturation.tokens <= slow.saturation.tokens
    for made in (slow, fast):
        assert made.simulation is not None
        assert made.simulation.step_seconds >= resident_cost(setting).step_seconds * (1 - 1e-9)
        assert made.saturation.tokens <= made.at_peak.tokens
        assert made.mfu is not None
        assert 0 < made.mfu < 1


def _planned() -> Forecast:
    return forecast(_scarce("peer", 2.0), "peer")


def test_the_curve_passes_through_the_plan_and_bends_at_the_threshold() -> None:
    planned = _planned()
    assert planned.simulation is not None
    here = curve_point(planned, planned.setting.sequences.tokens)
    assert here.step_seconds == pytest.approx(planned.simulation.step_seconds)
    assert here.exposed_seconds == pytest.approx(planned.simulation.exposed_seconds)
    below, above = curve_point(planned, 64), curve_point(planned, 4 * planned.saturation.tokens)
    assert below.exposed_seconds > 0.5 * below.step_seconds
    assert above.exposed_seconds < 0.001 * above.step_seconds
    assert curve_point(planned, 5000).tokens == 4096


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_the_threshold_does_not_depend_on_the_planned_tokens(batch: int) -> None:
    """Few tokens reach a low rate, from which a threshold would be far too low."""
    many, made = (forecast(_setting(QWEN, batch=n, sequence=512), "hybrid") for n in (32, batch))
    assert made.saturation.tokens == many.saturation.tokens
    assert made.schedule is not None
    there = curve_point(made, made.saturation.tokens + 512)
    assert there.exposed_seconds <= 0.01 * there.step_seconds
    assert [point.tokens for point in threshold_curve(made)] == [point.tokens for point in threshold_curve(many)]


def test_the_crossover_is_where_asyncep_and_all_to_all_meet() -> None:
    planned = _planned()
    crossover = crossover_tokens(planned)
    assert crossover is not None
    after, before = curve_point(planned, crossover), curve_point(planned, int(crossover / 1.01) - 4096)
    assert after.step_seconds <= after.all_to_all_seconds
    assert before.step_seconds > before.all_to_all_seconds
    alone = forecast(_setting(hardware=with_ranks(H100, 1)), "host")
    assert crossover_tokens(alone) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_every_preset(name: str) -> None:
    architecture = preset(name)
    for home in ("peer", "hybrid", "host"):
        made = forecast(_setting(architecture, batch=16), home)
        assert len(made.comparison) == 9
        assert made.saturation.tokens > 0
        assert made.cost("asyncep").memory_bytes >= least_memory_bytes(made.setting, home)
        assert made.reason
        assert not made.cost(made.chosen).fits or made.cost(made.chosen).memory_bytes <= made.setting.budget_bytes


def test_the_reason_for_another_strategy_that_is_faster_all_the_same() -> None:
    made = _planned()
    assert made.simulation is not None
    still = dataclasses.replace(made.simulation, exposed_seconds=0.0)
    text = reason(made.comparison, "dp_ep", None, still)
    assert text == "asyncep would wait for nothing, but would still be slower"
    assert reason(made.comparison, "dp_ep", None, None) == "asyncep does not fit"


def test_every_bank_that_stays_lowers_the_threshold_and_costs_its_bytes() -> None:
    planned = forecast(_setting(QWEN), "host")
    curve = threshold_curve(planned)
    first, last = curve[0], curve[-1]
    bank = bank_bytes(QWEN.typical_moe_layer.experts, QWEN.hidden, "bf16")  # type: ignore[arg-type]
    assert (first.resident_layers, first.tokens) == (0, planned.saturation.tokens)
    assert first.memory_bytes == least_memory_bytes(planned.setting, "host") + bank
    assert (last.resident_layers, last.tokens) == (len(QWEN.moe_layers), 0)
    # Nothing is streamed any more, so no slot is needed.
    assert last.memory_bytes - first.memory_bytes == (last.resident_layers - 2) * bank
    thresholds = [point.tokens for point in curve]
    assert thresholds == sorted(set(thresholds), reverse=True)


def test_a_profile_measured_on_a_cpu_has_a_host_that_computes_and_an_emulated_link_that_waits_slows_nothing() -> None:
    measured = Conditions("2026-01-01T00:00:00+00:00", "a processor", 8, 1, {}, computes_on_host=True)
    slowing = dataclasses.replace(H100.overlap, gemm=Figure(2.0, "user"), memory=Figure(2.0, "user"))
    hardware = dataclasses.replace(H100, conditions=measured, overlap=slowing)
    plain = streaming_execution(_setting(hardware=hardware), "host")
    assert not plain.host_runs_ahead
    assert streaming_execution(_setting(), "host").host_runs_ahead
    assert plain.copy_slowdown == pytest.approx(2.0)
    assert hardware.host is not None
    rate = hardware.host.bytes_per_s.value * hardware.efficiency.bandwidth.value / 4
    waiting = streaming_execution(_setting(hardware=with_emulated_link(hardware, rate)), "host")
    assert waiting.copy_slowdown == pytest.approx(1.25, rel=0.01)
    # A decoder that moves bytes at a quarter of the memory's rate slows computation as much.
    bank = BankSizes(1 << 20, 1 << 20, 1 << 31)
    at_memory_rate = decode_seconds(hardware, bank)
    slow = table_of({"bytes": (1 << 30, 1 << 31)}, [2 * at_memory_rate, 4 * at_memory_rate], "user", "", [0.0, 0.0])
    quick_link = with_emulated_link(dataclasses.replace(hardware, decode=slow), 1e15)
    assert streaming_execution(_setting(hardware=quick_link), "host", bank).copy_slowdown == pytest.approx(
        1.25, rel=0.01
    )


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (
            1.5,
            "all experts fit on every device, so nothing moves, 1.50 times as fast as dp_ep, the next strategy that "
            "fits",
        ),
        (
            1.04,
            "all experts fit on every device, so nothing moves; a tie with dp_ep, the next strategy that fits: "
            "predicted 1.04 times as fast, and predictions are up to 10% off",
        ),
    ],
)
def test_a_gain_smaller_than_the_error_of_predictions_is_a_tie(ratio: float, expected: str) -> None:
    costs = [StrategyCost("resident", 1.0, 0.0, 1.0, True), StrategyCost("dp_ep", ratio, 1.0, 1.0, True)]
    assert reason(costs, "resident", "dp_ep", None) == expected
