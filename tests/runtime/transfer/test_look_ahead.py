"""Slots are filled for the next run: the copies are used if the guess is right, and harmless if it is wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.passes.ir.plan import GatherSignature
from moepass.runtime.banks.banks import Bank
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_ring
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks, small_bank


def _ring(slots: int) -> Ring:
    ring = make_ring(slots, SLOT_BYTES, torch.device("cpu"), Link())
    ring.debug = True
    return ring


def _run(ring: Ring, graph: str, banks: list[Bank], slots: int) -> None:
    """Run over the banks and check each when it is read."""

    def read(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        assert holds(tensors, bank), f"bank {bank.spec.index} in run {graph}"

    run_banks(ring, graph, banks, slots, read)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_first_banks_of_a_repeated_run_are_in_slots(depth: int, slots: int) -> None:
    ring, banks = _ring(slots), [small_bank(index) for index in range(depth)]
    for _ in range(2):
        _run(ring, "forward", banks, slots)
    for runs in range(1, 4):
        _run(ring, "forward", banks, slots)
        assert ring.statistics.ahead_used == runs * min(slots, depth)
    assert ring.statistics.ahead_wasted == 0


def test_the_first_bank_is_copied_before_the_run_begins() -> None:
    ring, banks = _ring(2), [small_bank(index) for index in range(3)]
    for _ in range(2):
        _run(ring, "forward", banks, 2)
    copies = ring.statistics.copies
    ring.begin_run("forward", GatherSignature(slots=2))
    for slot in (0, 1):
        ring.prefetch([banks[slot].shard], banks[slot].spec, slot, None)
    assert ring.statistics.copies == copies


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    runs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_any_order_of_any_runs_is_right(slots: int, runs: list[list[int]], order: list[int]) -> None:
    ring, banks = _ring(slots), [small_bank(index) for index in range(5)]
    for number in order:
        chosen = number % len(runs)
        _run(ring, f"graph {chosen}", [banks[index] for index in runs[chosen]], slots)
    ring.reset()


def test_graphs_of_one_layer_each_prefetch_for_each_other() -> None:
    """A graph break in every layer gives graphs of one bank each, with a ring of two slots."""
    ring, banks = _ring(2), [small_bank(index) for index in range(5)]
    for _ in range(2):
        for index, bank in enumerate(banks):
            _run(ring, f"layer {index}", [bank], 2)
    assert ring.statistics.ahead_wasted == 0
    used = ring.statistics.ahead_used
    for index, bank in enumerate(banks):
        _run(ring, f"layer {index}", [bank], 2)
    assert ring.statistics.ahead_used == used + len(banks)


def test_uses_of_one_graph_for_all_layers_are_distinguished_by_bank() -> None:
    ring, banks = _ring(2), [small_bank(index) for index in range(3)]
    for _ in range(4):
        for bank in banks:
            _run(ring, "layer", [bank], 2)
    assert ring.statistics.ahead_wasted == 0
    assert ring.statistics.ahead_used >= 2 * len(banks)


def test_a_changed_order_is_counted_and_learned_again() -> None:
    ring, banks = _ring(2), [small_bank(index) for index in range(4)]
    for _ in range(3):
        _run(ring, "one", banks[:2], 2)
    _run(ring, "two", banks[2:], 2)
    assert ring.statistics.ahead_wasted == 2
    for _ in range(2):
        _run(ring, "two", banks[2:], 2)
    used = ring.statistics.ahead_used
    _run(ring, "two", banks[2:], 2)
    assert ring.statistics.ahead_used == used + 2


def test_a_bank_that_changed_between_runs_is_copied_again() -> None:
    ring, banks = _ring(2), [small_bank(index) for index in range(3)]
    for _ in range(3):
        _run(ring, "forward", banks, 2)
    used = ring.statistics.ahead_used
    banks[0].views(banks[0].shard)[0].fill_(42.0)
    _run(ring, "forward", banks, 2)
    assert ring.statistics.ahead_used == used + 1


def test_after_an_exception_no_earlier_copy_is_used() -> None:
    ring, banks = _ring(2), [small_bank(index) for index in range(3)]
    for _ in range(3):
        _run(ring, "forward", banks, 2)
    ring.begin_run("forward", GatherSignature(slots=2))
    ring.prefetch([banks[0].shard], banks[0].spec, 0, None)
    ring.reset()
    used = ring.statistics.ahead_used
    _run(ring, "forward", banks, 2)
    assert ring.statistics.ahead_used == used
    for _ in range(2):
        _run(ring, "forward", banks, 2)
    assert ring.statistics.ahead_used == used + 2 * 2


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.usefixtures("no_grad")
def test_compiled_models_stay_exact_run_after_run(form: str, slots: int) -> None:
    model = Stack(form, depth=3)
    inputs = [tokens(count, seed=count) for count in (4, 9, 4, 4, 9, 9, 9)]
    expected = [model(x) for x in inputs]
    report = moepass.offload_experts(model, slots=slots)
    compiled = torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager", "debug": True})
    for x, want in zip(inputs, expected, strict=True):
        assert torch.equal(compiled(x), want)
    assert report.store.ring().statistics.ahead_used >= slots
