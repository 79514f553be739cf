"""The ring's streams and events on an emulated CUDA: in any order of execution, every bank is read correctly."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.models.errors import OptionError
from moepass.passes.ir.plan import GatherSignature
from moepass.passes.ir.timeline import COMPUTE, COPY
from moepass.runtime.banks.banks import Bank
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.lanes import StreamLane
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import parse_link
from moepass.runtime.transfer.ring import Ring, make_ring
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks, small_bank

CPU = torch.device("cpu")


BANKS = [small_bank(index) for index in range(5)]


def _ring(slots: int) -> Ring:
    ring = Ring(slots, SLOT_BYTES, CPU, Copier(StreamLane(CPU)))
    ring.debug = True
    return ring


def _check(wrong: list[str], tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
    if not holds(tensors, bank):
        wrong.append(bank.spec.name)


def _wrong_reads(seed: int, slots: int, runs: list[list[int]], order: list[int]) -> list[str]:
    """Run a ring over the banks `runs` in that `order`; return the banks that were read wrong.

    If the order differs from the times before, slots were filled ahead with the wrong banks.
    """
    wrong: list[str] = []
    with FakeCuda(random.Random(seed)).installed() as cuda:
        ring = _ring(slots)
        for number in order:
            run = number % len(runs)
            banks = [BANKS[index] for index in runs[run]]
            run_banks(ring, run, banks, slots, lambda *read: cuda.issue(functools.partial(_check, wrong, *read)))
        cuda.finish()
        del ring
    return wrong


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    runs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=8),
)
def test_every_bank_is_read_as_it_is(seed: int, slots: int, runs: list[list[int]], order: list[int]) -> None:
    assert _wrong_reads(seed, slots, runs, order) == []


def _copy_at_once(copier: Copier, fetch: Fetch, slot: torch.Tensor, after: object, dropped: object) -> object:
    return _submit(copier, fetch, slot, None)


def _copy_on_a_new_stream(copier: Copier, fetch: Fetch, slot: torch.Tensor, after: object, dropped: object) -> object:
    copier._lane.stream = torch.cuda.Stream(CPU)
    return _submit(copier, fetch, slot, after)


def _wait_for_nothing(copier: Copier, filled: object, statistics: object) -> None:
    pass


_submit = Copier.submit


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Copier, "submit", _copy_at_once),
        (Copier, "submit", _copy_on_a_new_stream),
        (Copier, "wait", _wait_for_nothing),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(owner: type, method: str, broken: Callable[..., Any]) -> None:
    runs, order = [[0, 1, 2, 3], [3, 1, 0]], [0, 0, 1, 0, 1, 1, 0]
    with mock.patch.object(owner, method, broken):
        assert any(_wrong_reads(seed, 2, runs, order) for seed in range(120))


def _wrong_reads_of_changed_banks(seed: int, slots: int, runs: list[tuple[int, list[int]]]) -> int:
    """Run a ring on one of two streams after some banks have changed there; return how many were read wrong."""
    banks = [small_bank(index) for index in range(4)]
    wrong: list[str] = []
    with FakeCuda(random.Random(seed)).installed() as cuda:
        ring = _ring(slots)
        streams = [cuda.compute, cuda.stream()]
        for number, changed in runs:
            with cuda.on(streams[number]):
                if changed:  # runs on the other stream have read these banks
                    streams[number].wait_stream(streams[1 - number])
                for tensor in (tensor for index in changed for tensor in banks[index].views(banks[index].shard)):
                    tensor.mul_(3)
                run_banks(ring, 0, banks, slots, lambda *read: cuda.issue(functools.partial(_check, wrong, *read)))
        cuda.finish()
        del ring
    return len(wrong)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    runs=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), max_size=2)), max_size=6),
)
def test_banks_that_change_between_runs_are_copied_after_the_change(
    seed: int, slots: int, runs: list[tuple[int, list[int]]]
) -> None:
    assert _wrong_reads_of_changed_banks(seed, slots, runs) == 0


@pytest.mark.parametrize("runs", [[(0, []), (0, []), (0, [0, 1])], [(0, []), (0, []), (1, [0, 1])]])
def test_the_emulation_notices_copies_before_the_change(runs: list[tuple[int, list[int]]]) -> None:
    with mock.patch.object(Copier, "begin_run"):
        assert any(_wrong_reads_of_changed_banks(seed, 2, runs) for seed in range(120))


def _fail_in_a_run(ring: Ring) -> None:
    with ring.run("first", GatherSignature(slots=2)):
        ring.prefetch([BANKS[0].shard], BANKS[0].spec, 0, None)
        raise ZeroDivisionError


def test_an_interrupted_run_leaves_no_running_copies() -> None:
    with FakeCuda(random.Random(0)).installed() as cuda:
        ring = _ring(2)
        with pytest.raises(ZeroDivisionError):
            _fail_in_a_run(ring)
        assert cuda.is_idle
        del ring
        gc.collect()  # the error has kept it


def test_links_are_not_emulated_on_a_gpu() -> None:
    with pytest.raises(OptionError, match="works on device cpu only"):
        make_ring(2, SLOT_BYTES, torch.device("cuda", 0), parse_link("emulate:1e9"))


def test_waits_and_copies_are_timed_by_events() -> None:
    """The only slot makes each copy wait for the computation before it, and the next computation for the copy."""
    banks = [BANKS[0], BANKS[1], BANKS[2]]
    with FakeCuda(random.Random(0)).installed() as cuda, moepass.record_timeline() as recording:
        ring = _ring(1)
        recording.begin_run(torch.device("cuda", 0))
        run_banks(ring, 0, banks, 1, lambda *read: [cuda.issue(lambda: None) for _ in range(5)])
        cuda.finish()
        statistics = ring.statistics
        del ring
    assert statistics.waited_seconds > 0
    timeline = recording.timeline
    copies, waits = timeline.on(COPY), timeline.on(COMPUTE)
    assert [event.layer for event in waits] == [bank.spec.name for bank in banks]
    assert {event.layer for event in copies} >= {bank.spec.name for bank in banks}
    assert sum(event.seconds for event in waits) == pytest.approx(statistics.waited_seconds)
    ends = {event.layer: event.end_seconds for event in copies}
    assert all(event.end_seconds >= ends[event.layer] for event in waits[1:])
    assert timeline.source == "measured"
