"""The simulator, compared with cases computed by hand, with bounds, and with an independent recurrence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, Plan, Step
from moepass.passes.ir.protocol import PlanError
from moepass.passes.ir.timeline import COMPUTE, COPY
from moepass.passes.planner.phases import LayerPhase, TimedStep, phase_steps, plan_steps, streamed_phases
from moepass.passes.planner.simulate import ExecutionModel, Simulation, simulate, simulate_phases, simulate_plan
from tests.helpers.graphs.error_fields import refused


def phase(
    number: int, compute: float, transfer: float = 0.0, bank_bytes: int | None = None, decode: float | None = None
) -> LayerPhase:
    """Return a phase whose bank is encoded if `decode` is a number of seconds."""
    nbytes = (100 if transfer else 0) if bank_bytes is None else bank_bytes
    plain = LayerPhase(f"phase {number}", f"layers.{number}", compute, nbytes, transfer)
    if decode is None or not nbytes:
        return plain
    return dataclasses.replace(plain, encoded_bytes=1, decode_seconds=decode)


def layers(
    count: int, compute: float, transfer: float, attention: float = 0.0, decode: float | None = None
) -> list[LayerPhase]:
    phases_of_layers = []
    for layer in range(count):
        if attention:
            phases_of_layers.append(LayerPhase(f"attention {layer}", f"layers.{layer}", attention))
        phases_of_layers.append(phase(layer, compute, transfer, decode=decode))
    return phases_of_layers


# ---- By hand ---------------------------------------------------------------------------------------------------------


def test_transfers_shorter_than_computation_vanish() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=2), slots=2)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (6, 0)
    assert simulated.bounds.step_seconds == simulated.bounds.path_seconds == 6


def test_transfers_longer_than_computation_set_the_pace() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=5), slots=2)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (10, 4)
    assert simulated.bounds.step_seconds == simulated.bounds.link_seconds == 10


def test_one_slot_makes_transfer_and_computation_take_turns() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=2), slots=1)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (10, 4)
    assert simulated.bounds.step_seconds == simulated.bounds.slots_seconds == 10


def test_one_slot_fills_while_attention_runs() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=2, attention=1), slots=1)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (10, 2)


def test_a_resident_stage_moves_nothing() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=5), slots=2, resident=[0])
    assert (simulated.step_seconds, simulated.exposed_seconds) == (6, 0)
    assert simulated.peak_slot_bytes == 200, "the one streamed bank, and the same one for the next run"
    assert simulate_phases(layers(2, compute=3, transfer=5), slots=1, resident=[0]).peak_slot_bytes == 100


def test_copies_slow_computation_down_only_while_they_run() -> None:
    # In each phase, 2 seconds run at half speed during a copy, which complete 1 of its 3 seconds; 2 remain.
    simulated = simulate_phases(layers(2, compute=3, transfer=2), slots=2, machine=ExecutionModel(copy_slowdown=2))
    assert (simulated.step_seconds, simulated.exposed_seconds, simulated.slowed_seconds) == (8, 0, 2)
    assert simulated.compute_seconds == 6


def test_a_transport_that_never_guesses_shows_the_first_transfer() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=2), slots=2, machine=ExecutionModel(fills_ahead=False))
    assert (simulated.step_seconds, simulated.exposed_seconds) == (8, 2)
    assert simulated.bounds.path_seconds == 8


def test_issuing_takes_compute_time_where_the_host_computes() -> None:
    # Ten steps: two each of prefetch, acquire, release and segment.
    machine = ExecutionModel(issue_seconds=0.25)
    assert simulate_phases(layers(2, compute=3, transfer=2), slots=2, machine=machine).step_seconds == 8
    ahead = dataclasses.replace(machine, host_runs_ahead=True)
    # The host is ahead, except at the start of a run, which issues two prefetches, an acquire and a segment.
    assert simulate_phases(layers(2, compute=3, transfer=2), slots=2, machine=ahead).step_seconds == 7


def test_two_links_bring_banks_side_by_side() -> None:
    both = [phase(0, 3, 5), dataclasses.replace(phase(1, 3, 5), link="host link")]
    simulated = simulate_phases(both, slots=2)
    assert simulated.bounds.link_seconds == 5
    # A slot holds each bank for 8 seconds, and there are two.
    assert simulated.step_seconds == simulated.bounds.slots_seconds == 8
    assert simulated.timeline.streams == ("host", "compute", "copy", "host link")


def test_consecutive_graphs_fetch_ahead_for_each_other() -> None:
    """A graph break in every layer makes graphs of one bank each, for a ring of two slots."""
    runs = [phase_steps([phase], slots=1) for phase in layers(3, compute=3, transfer=2)]
    assert simulate(runs, ring_slots=2).exposed_seconds == 0
    alone = simulate(runs, ring_slots=1)
    assert (alone.step_seconds, alone.exposed_seconds) == (15, 6)


def test_the_timeline_shows_one_step() -> None:
    simulated = simulate_phases(layers(2, compute=3, transfer=5), slots=2)
    shown = [
        (event.op, event.layer, event.start_seconds, event.end_seconds) for event in simulated.timeline.on(COMPUTE)
    ]
    assert shown == [
        ("wait", "layers.0", 0, 2), ("segment", "phase 0", 2, 5),
        ("wait", "layers.1", 5, 7), ("segment", "phase 1", 7, 10),
    ]  # fmt: skip
    copies = [(event.layer, event.start_seconds, event.end_seconds) for event in simulated.timeline.on(COPY)]
    assert copies == [("layers.1", 2, 7), ("layers.0", 7, 12)]
    assert simulated.timeline.source == "derived"


# ---- Encoded banks, by hand ------------------------------------------------------------------------------------------

ON_A_DEVICE = ExecutionModel(host_runs_ahead=True)


@pytest.mark.parametrize(
    ("compute", "transfer", "decode", "pace"),
    [(4, 4, 4, 4), (0, 4, 3, 4), (0, 3, 4, 4), (5, 4, 3, 5), (1, 4, 4, 4)],
)
def test_the_longest_of_copy_decode_and_computation_sets_the_pace(
    compute: float, transfer: float, decode: float, pace: float
) -> None:
    simulated = simulate_phases(layers(6, compute, transfer, decode=decode), slots=2, machine=ON_A_DEVICE)
    assert simulated.step_seconds == simulated.bounds.step_seconds == 6 * pace
    assert simulated.exposed_seconds == 6 * (pace - compute)


def test_where_the_host_computes_only_the_first_copy_of_a_run_waits_for_a_slot() -> None:
    """A bank of the next run is copied when a slot is free for it, and all later ones before."""
    simulated = simulate_phases(layers(6, compute=4, transfer=4, decode=4), slots=2)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (28, 4)


def test_one_slot_is_decoded_into_while_the_next_bank_is_copied() -> None:
    # Each phase decodes and computes in turns, and the copies take place during both.
    simulated = simulate_phases(layers(6, compute=2, transfer=3, decode=1), slots=1, machine=ON_A_DEVICE)
    assert simulated.step_seconds == simulated.bounds.step_seconds == simulated.bounds.slots_seconds == 18


def test_a_run_that_begins_with_empty_slots_waits_for_a_copy_and_its_decode() -> None:
    never_guesses = ExecutionModel(fills_ahead=False)
    simulated = simulate_phases(layers(3, compute=4, transfer=4, decode=3), slots=2, machine=never_guesses)
    assert (simulated.step_seconds, simulated.exposed_seconds) == (19, 7)


def test_the_timeline_shows_decodes_during_copies() -> None:
    simulated = simulate_phases(layers(2, compute=0, transfer=5, decode=4), slots=1, machine=ON_A_DEVICE)
    timeline = simulated.timeline
    assert timeline.streams == ("host", "compute", "decode", "copy")
    shown = {
        stream: [(event.op, event.layer, event.start_seconds, event.end_seconds) for event in timeline.on(stream)]
        for stream in ("decode", "copy")
    }
    assert shown == {
        "copy": [("copy", "layers.1", 1, 6), ("copy", "layers.0", 6, 11)],
        "decode": [("decode", "layers.0", 1, 5), ("decode", "layers.1", 6, 10)],
    }


# ---- Plans -----------------------------------------------------------------------------------------------------------


def _plan() -> Plan:
    banks = tuple(BankSpec(index, f"layers.{index}.experts", "host", BankFormat.plain(100), ()) for index in range(2))
    steps = (
        Step("prefetch", "block", 0, 0), Step("segment", "segment_0"), Step("acquire", "block", 0, 0),
        Step("segment", "segment_1"), Step("release", "block", 0, 0), Step("prefetch", "block", 1, 0),
        Step("segment", "segment_0"), Step("acquire", "block", 1, 0), Step("segment", "segment_1"),
        Step("release", "block", 1, 0), Step("segment", "segment_2"),
    )  # fmt: skip
    return Plan(banks=banks, slots=1, slot_bytes=100, steps=steps)


def test_a_plan_is_run_with_its_own_steps() -> None:
    # By hand: bank 1 takes 4 seconds during 1 of segment_0; bank 0 takes 2 during 1.5 of segment_2 and segment_0.
    simulated = simulate_plan(_plan(), [1, 2, 1, 2, 0.5], {0: 2.0, 1: 4.0})
    assert (simulated.step_seconds, simulated.exposed_seconds) == (10, 3.5)
    assert [event.layer for event in simulated.timeline.on(COPY)] == ["layers.1.experts", "layers.0.experts"]


def test_an_encoded_bank_takes_its_size_in_the_slot_and_a_decode() -> None:
    plain = _plan()
    banks = tuple(dataclasses.replace(bank, format=BankFormat(60, 50, 100, "packed")) for bank in plain.banks)
    steps = []
    for step in plain.steps:
        decode = [Step("decode", step.name, step.bank, step.slot)] if step.op == "prefetch" else []
        steps += [step, *decode]
    encoded = dataclasses.replace(plain, banks=banks, steps=tuple(steps))
    seconds = [1, 2, 1, 2, 0.5], {0: 2.0, 1: 4.0}
    timed = plan_steps(encoded, *seconds, {0: 0.5, 1: 0.25})
    decodes = [(step.layer, step.seconds) for step in timed if step.op == "decode"]
    assert decodes == [("layers.0.experts", 0.5), ("layers.1.experts", 0.25)]
    without = [dataclasses.replace(step, is_encoded=False) for step in timed if step.op != "decode"]
    assert without == list(plan_steps(plain, *seconds))
    with pytest.raises(KeyError):
        plan_steps(encoded, *seconds)


def test_wrong_numbers_of_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="the plan has 5 segments, but there are seconds for 2"):
        plan_steps(_plan(), [1, 2], {0: 1.0, 1: 1.0})
    with pytest.raises(KeyError):
        plan_steps(_plan(), [1] * 5, {0: 1.0})


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_seconds_that_are_no_time_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"segment phase 0 takes .* it must be a finite time from 0 on"):
        simulate_phases([phase(0, seconds, 1)], slots=1)
    with pytest.raises(ValueError, match="copy_slowdown is"):
        ExecutionModel(copy_slowdown=seconds)
    with pytest.raises(ValueError, match="issue_seconds is"):
        ExecutionModel(issue_seconds=seconds)


def test_endless_waits_are_refused() -> None:
    with pytest.raises(PlanError, match=r"acquire of a in slot 0 waits forever: there is no prefetch before it"):
        simulate([[TimedStep("acquire", "a", slot=0)]])
    with refused(PlanError, name="a", value=0):
        simulate([[TimedStep("release", "a", slot=0)]])
    with refused(PlanError, name="slots", value=0, expected="1 or more"):
        phase_steps(layers(1, 1, 1), slots=0)


def test_a_model_without_banks_needs_no_slot() -> None:
    simulated = simulate_phases([phase(0, 2), phase(1, 3)], slots=0)
    assert (simulated.step_seconds, simulated.exposed_seconds, simulated.peak_slot_bytes) == (5, 0, 0)
    assert simulated.bounds.step_seconds == 5


# ---- Properties for random phases ------------------------------------------------------------------------------------

SECONDS = st.integers(0, 20).map(lambda eighths: eighths / 8)
PHASES = st.lists(
    st.builds(phase, st.integers(0, 9), SECONDS, SECONDS, st.sampled_from([0, 1, 50, 100])), min_size=1, max_size=7
)
# Like PHASES, and some banks are encoded.
DECODES = st.one_of(st.none(), SECONDS)
ENCODED_PHASES = st.lists(
    st.builds(phase, st.integers(0, 9), SECONDS, SECONDS, st.sampled_from([0, 1, 50, 100]), DECODES),
    min_size=1,
    max_size=7,
)


def by_recurrence(phases: Sequence[LayerPhase], slots: int, steps: int = 60) -> float:
    """Return the seconds per step, as the mean of the second half of many steps, from a recurrence over end times."""
    streamed = streamed_phases(phases)
    copied: list[float] = []
    released: list[float] = []
    time, ends = 0.0, []
    for _ in range(steps):
        for index, phase in enumerate(phases):
            if index in streamed:
                # Every free slot is filled at once: copies are `slots` ahead of the releases.
                after = released[len(copied) - slots] if len(copied) >= slots else 0.0
                copied.append(max(after, copied[-1] if copied else 0.0) + phase.transfer_seconds)
                time = max(time, copied[-1])
            time += phase.compute_seconds
            if index in streamed:
                released.append(time)
        ends.append(time)
    return (ends[-1] - ends[steps // 2 - 1]) / (steps - steps // 2)


@settings(max_examples=200, deadline=None)
@given(phases=PHASES, slots=st.integers(1, 4))
def test_the_simulator_agrees_with_the_recurrence(phases: list[LayerPhase], slots: int) -> None:
    # A ring with room for more than one run's banks knows only the next run, so it fetches no further ahead.
    slots = min(slots, max(1, len(streamed_phases(phases))))
    assert simulate_phases(phases, slots).step_seconds == pytest.approx(
        by_recurrence(phases, slots), rel=1e-6, abs=1e-9
    )


@settings(max_examples=200, deadline=None)
@given(
    phases=ENCODED_PHASES,
    slots=st.integers(1, 4),
    slowdown=st.sampled_from([1.0, 1.0, 1.25, 2.0]),
    issue=st.sampled_from([0.0, 0.0, 0.125]),
    host_runs_ahead=st.booleans(),
    fills_ahead=st.booleans(),
)
def test_every_simulation_adds_up(
    phases: list[LayerPhase], slots: int, slowdown: float, issue: float, host_runs_ahead: bool, fills_ahead: bool
) -> None:
    machine = ExecutionModel(slowdown, issue, host_runs_ahead, fills_ahead)
    simulated = simulate_phases(phases, slots, machine=machine)
    serial = sum(phase.compute_seconds for phase in phases)
    serial += sum(phase.transfer_seconds + phase.decode_seconds for phase in phases if phase.bank_bytes)
    steps = len(phase_steps(phases, slots))
    assert simulated.step_seconds >= simulated.bounds.step_seconds - 1e-9
    assert simulated.step_seconds <= serial * slowdown + issue * steps * slowdown + 1e-9
    if not host_runs_ahead:
        parts = simulated.compute_seconds + issue * steps + simulated.exposed_seconds + simulated.slowed_seconds
        assert simulated.step_seconds == pytest.approx(parts, abs=1e-9)
    assert simulated.peak_slot_bytes <= slots * max(phase.bank_bytes for phase in phases)
    _check_timeline(simulated)


def _check_timeline(found: Simulation) -> None:
    for stream in found.timeline.streams:
        events = found.timeline.on(stream)
        for earlier, later in pairwise(events):
            assert earlier.end_seconds <= later.start_seconds + 1e-9
    assert found.timeline.seconds("segment") <= found.step_seconds + 1e-9


@settings(max_examples=100, deadline=None)
@given(phases=ENCODED_PHASES, slots=st.integers(1, 4), host_runs_ahead=st.booleans(), fills_ahead=st.booleans())
def test_more_slots_or_resident_banks_are_never_slower(
    phases: list[LayerPhase], slots: int, host_runs_ahead: bool, fills_ahead: bool
) -> None:
    # If issuing takes time they may be slower, because more prefetches precede the first acquire.
    machine = ExecutionModel(host_runs_ahead=host_runs_ahead, fills_ahead=fills_ahead)
    fewer = simulate_phases(phases, slots, machine=machine).step_seconds
    assert simulate_phases(phases, slots + 1, machine=machine).step_seconds <= fewer + 1e-9
    for index in streamed_phases(phases):
        assert simulate_phases(phases, slots, resident=[index], machine=machine).step_seconds <= fewer + 1e-9


@settings(max_examples=100, deadline=None)
@given(phases=ENCODED_PHASES, slots=st.integers(1, 4), scale=st.sampled_from([1e-6, 1e3]))
def test_time_has_no_scale(phases: list[LayerPhase], slots: int, scale: float) -> None:
    scaled = [
        dataclasses.replace(
            phase,
            compute_seconds=phase.compute_seconds * scale,
            transfer_seconds=phase.transfer_seconds * scale,
            decode_seconds=phase.decode_seconds * scale,
        )
        for phase in phases
    ]
    expected = simulate_phases(phases, slots).step_seconds * scale
    assert simulate_phases(scaled, slots).step_seconds == pytest.approx(expected, rel=1e-6)
