"""The search for a schedule, compared with all possible schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.protocol import PlanError
from moepass.passes.planner import schedule_search
from moepass.passes.planner.phases import LayerPhase, RingSchedule, streamed_phases
from moepass.passes.planner.schedule_search import _Search, search_schedule, steady_step
from moepass.passes.planner.simulate import ExecutionModel, simulate_phases
from tests.helpers.mutants.random_cases import times


def phase(
    number: int,
    compute: float,
    transfer: float = 0.0,
    bank_bytes: int = 0,
    shard_bytes: int = 0,
    encoded_bytes: int = 0,
    decode: float = 0.0,
) -> LayerPhase:
    return LayerPhase(
        f"phase {number}",
        f"layers.{number}",
        compute,
        bank_bytes,
        transfer,
        shard_bytes=min(shard_bytes, bank_bytes),
        encoded_bytes=encoded_bytes,
        decode_seconds=decode if encoded_bytes else 0.0,
    )


SECONDS = st.integers(0, 24).map(lambda eighths: eighths / 8)
DENSE = st.builds(phase, st.just(0), SECONDS)


def model(most: int) -> st.SearchStrategy[list[LayerPhase]]:
    """Draw the phases of a model whose banks may differ in size and format, independently of their transfer time.

    A device has shards of all streamed banks or of none.
    """

    def phases(shard_bytes: int) -> st.SearchStrategy[list[LayerPhase]]:
        sizes = st.sampled_from([4, 6, 10]), st.just(shard_bytes), st.sampled_from([0, 0, 2, 5])
        streamed = st.builds(phase, st.just(1), SECONDS, SECONDS, *sizes, SECONDS)
        return st.lists(st.one_of(DENSE, streamed, streamed), min_size=2, max_size=most).filter(streamed_phases)

    return st.sampled_from([0, 0, 2, 4, 10]).flatmap(phases)


# The properties of a machine that a search needs: whether slots fill across steps, and how copies slow computation.
MACHINES = st.builds(
    ExecutionModel,
    copy_slowdown=st.sampled_from([1.0, 1.0, 1.25, 2.0]),
    host_runs_ahead=st.booleans(),
    fills_ahead=st.booleans(),
)


def every_schedule(
    phases: Sequence[LayerPhase], memory_bytes: int, most_slots: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the slots and resident banks of every schedule that fits."""
    banks = streamed_phases(phases)
    for size in range(len(banks) + 1):
        for resident in itertools.combinations(banks, size):
            needed = streamed_phases(phases, resident)
            resident_bytes = sum(phases[index].bank_bytes for index in resident)
            slot_bytes = max((phases[index].bank_bytes for index in needed), default=0)
            for slots in range(1, most_slots + 1):
                shards = sum(phases[index].shard_bytes for index in needed)
                encoded_bytes = max((phases[index].encoded_bytes for index in needed), default=0)
                if resident_bytes + shards + min(slots, len(needed)) * slot_bytes + 2 * encoded_bytes > memory_bytes:
                    continue
                yield slots, resident


def check(
    phases: list[LayerPhase], budget: int, most_slots: int, most_tried: int, machine: ExecutionModel | None = None
) -> None:
    machine = machine or ExecutionModel()
    every = list(every_schedule(phases, budget, most_slots))
    if not every:
        with pytest.raises(PlanError, match=f"memory_bytes is {budget}; resident banks, shards and one slot"):
            search_schedule(phases, budget, most_slots)
        return
    with mock.patch.object(schedule_search, "MOST_TRIED", most_tried):
        chosen_schedule = search_schedule(phases, budget, most_slots, machine=machine)
    _check_claims(phases, budget, most_slots, chosen_schedule)
    compute = sum(phase.compute_seconds for phase in phases)
    best = min(steady_step(phases, slots, frozenset(resident), machine)[0] for slots, resident in every)
    chosen = simulate_phases(phases, chosen_schedule.slots, chosen_schedule.resident, machine).step_seconds
    assert chosen - compute <= 1.05 * (best - compute) + 1e-6
    assert (
        _Search(phases, budget, range(1, most_slots + 1), machine).least_step() <= best + 1e-9
        or not chosen_schedule.order
    )


def _check_claims(phases: list[LayerPhase], budget: int, most_slots: int, chosen_schedule: RingSchedule) -> None:
    assert chosen_schedule.memory_bytes <= budget
    assert chosen_schedule.slots <= most_slots
    assert sorted((*chosen_schedule.resident, *chosen_schedule.order)) == list(streamed_phases(phases))


@settings(max_examples=120, deadline=None)
@given(model(most=5), st.integers(4, 40), st.integers(1, 3), MACHINES)
def test_small_instances_are_solved(
    phases: list[LayerPhase], budget: int, most_slots: int, machine: ExecutionModel
) -> None:
    check(phases, budget, most_slots, 1500, machine)


@settings(max_examples=60, deadline=None)
@given(model(most=5), st.integers(4, 40), st.integers(1, 3))
def test_the_best_schedule_is_chosen_if_nothing_is_fetched_ahead(
    phases: list[LayerPhase], budget: int, most_slots: int
) -> None:
    """The transport `collective` does not fetch the first banks of a run ahead."""
    machine = ExecutionModel(fills_ahead=False)
    every = list(every_schedule(phases, budget, most_slots))
    if not every:
        return
    chosen_schedule = search_schedule(phases, budget, most_slots, machine=machine)
    best = min(simulate_phases(phases, slots, resident, machine).step_seconds for slots, resident in every)
    assert simulate_phases(phases, chosen_schedule.slots, chosen_schedule.resident, machine).step_seconds <= best + 1e-6


def test_fetching_ahead_decides_which_bank_is_resident() -> None:
    """Any of equal banks may be resident if slots fill across steps; else the first, whose copy is exposed."""
    phases = [phase(layer, 4, 4, 10) for layer in range(4)]
    best = search_schedule(phases, 30, slots=2, machine=ExecutionModel(fills_ahead=False))
    assert best.resident == (0,)
    with_fills_ahead = [simulate_phases(phases, 2, [index]).step_seconds for index in range(4)]
    assert len(set(with_fills_ahead)) == 1


@settings(max_examples=120, deadline=None)
@given(model(most=5), st.integers(4, 40), st.integers(1, 3), MACHINES)
def test_small_instances_are_solved_without_trying_everything(
    phases: list[LayerPhase], budget: int, most_slots: int, machine: ExecutionModel
) -> None:
    """The search for deep models starts from few schedules, and improves them by single exchanges."""
    check(phases, budget, most_slots, 200, machine)


@pytest.mark.slow
@settings(max_examples=times(300), deadline=None)
@given(model(most=6), st.integers(4, 60), st.integers(1, 4), st.sampled_from([200, 1500]), MACHINES)
def test_instances_are_solved(
    phases: list[LayerPhase], budget: int, most_slots: int, most_tried: int, machine: ExecutionModel
) -> None:
    check(phases, budget, most_slots, most_tried, machine)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(model(most=7), st.integers(1, 4), MACHINES)
def test_the_recurrence_is_the_simulator(phases: list[LayerPhase], slots: int, machine: ExecutionModel) -> None:
    slots = min(slots, len(streamed_phases(phases)))
    step, waits = steady_step(phases, slots, frozenset(), machine)
    simulated = simulate_phases(phases, slots, machine=machine)
    assert simulated.step_seconds == pytest.approx(step, rel=1e-6, abs=1e-9)
    if not machine.fills_ahead:  # otherwise alternate steps may wait
        assert simulated.exposed_seconds == pytest.approx(sum(waits), rel=1e-6, abs=1e-9)


# Realistic models: a first layer without experts, dense layers in between, two kinds of attention.
def _real(layers: int) -> list[LayerPhase]:
    phases = []
    for layer in range(layers):
        attention = 0.004 if layer % 4 == 3 else 0.0012
        phases.append(phase(layer, attention))
        streams = layer > 0 and layer % 6 != 5
        phases.append(phase(layer, 0.003, 0.0056, 1_200) if streams else phase(layer, 0.001))
    return phases


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_deep_models_are_planned_after_few_trials(share: float) -> None:
    phases = _real(94)
    banks = sum(phase.bank_bytes for phase in phases)
    budget = int(share * banks)
    with mock.patch.object(schedule_search, "steady_step", side_effect=steady_step) as tried:
        best = search_schedule(phases, budget)
    assert tried.call_count <= schedule_search.MOST_TRIED
    _check_claims(phases, budget, 4, best)
    step = simulate_phases(phases, best.slots, best.resident).step_seconds
    assert step <= simulate_phases(phases, slots=2, resident=_first(phases, budget - 2 * 1_200)).step_seconds
    assert step <= 1.03 * _Search(phases, budget, range(1, 5)).least_step()


def _first(phases: list[LayerPhase], room: int) -> list[int]:
    """Return the schedule in which the first layers are resident, as with `resident_bytes`."""
    chosen = []
    for index in streamed_phases(phases):
        room -= phases[index].bank_bytes
        if room < 0:
            break
        chosen.append(index)
    return chosen


def test_a_budget_for_all_banks_keeps_all() -> None:
    best = search_schedule(_real(12), 10**6)
    assert best.order == ()
    assert (best.slots, best.slot_bytes) == (0, 0)
    assert best.distance == 0


def test_of_unequal_banks_that_stays_which_saves_most() -> None:
    """The second bank takes 9 seconds to copy, with 1 second of computation before it."""
    phases = [phase(0, 10, 1, 5), phase(1, 1, 1, 5), phase(2, 1, 9, 5), phase(3, 10, 4, 5)]
    best = search_schedule(phases, memory_bytes=15, most_slots=2)
    assert (best.resident, best.order, best.slots) == ((2, 3), (0, 1), 1)
    assert simulate_phases(phases, best.slots, best.resident).exposed_seconds == 1


def test_invalid_searches_are_refused() -> None:
    with pytest.raises(ValueError, match="most_slots is 0"):
        search_schedule(_real(4), 10**6, most_slots=0)
    with pytest.raises(ValueError, match=r"banks use 2 links, copy, disk; the search supports one"):
        search_schedule([phase(0, 1, 1, 1), LayerPhase("b", "b", 1, 1, 1, link="disk")], 1)
