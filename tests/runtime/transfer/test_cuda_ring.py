"""The ring's use of streams and events, on a CUDA that is emulated: whatever runs when, every bank is read as it is."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda, Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_runs import SLOT_BYTES, holds, run_banks, small_bank

from moepass.models.errors import OptionError
from moepass.passes.ir.plan import GatherSignature
from moepass.runtime.banks.banks import Bank
from moepass.runtime.transfer import ring as ring_module
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import Link, parse_link
from moepass.runtime.transfer.ring import CudaRing

CPU = torch.device("cpu")


BANKS = [small_bank(index) for index in range(5)]

_buffers = ring_module._buffers


def _used_buffers(slots: int, slot_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Memory that the compute stream has not finished with, as torch's allocator may give."""
    buffers = _buffers(slots, slot_bytes, device)
    for buffer in buffers:
        buffer.fill_(0)
    return buffers


def _wrong_reads(seed: int, slots: int, runs: list[list[int]], order: list[int]) -> list[str]:
    """Of a ring that runs over the banks `runs` in that `order`: what was read and is not the bank that was asked for.

    Where an order is not that of the times before, slots were filled ahead with the wrong banks.
    """
    wrong: list[str] = []

    def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, bank):
            wrong.append(bank.spec.name)

    with FakeCuda(random.Random(seed)).installed() as cuda:
        with mock.patch.object(ring_module, "_buffers", _used_buffers):
            ring = CudaRing(slots, SLOT_BYTES, CPU, Link(), debug=True)
        for number in order:
            run = number % len(runs)
            banks = [BANKS[index] for index in runs[run]]
            run_banks(ring, run, banks, slots, lambda *read: cuda.issue(functools.partial(check, *read)))
        cuda.finish()
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


def _copy_at_once(ring: CudaRing, fetch: Fetch, memory: torch.Tensor, after: object) -> object:
    return _start_copy(ring, fetch, memory, None)


def _copy_on_a_new_stream(ring: CudaRing, fetch: Fetch, memory: torch.Tensor, after: object) -> object:
    ring._stream = torch.cuda.Stream(CPU)
    return _start_copy(ring, fetch, memory, after)


def _do_not_wait(waiting: object, awaited: object) -> None:
    pass


_start_copy = CudaRing._start_copy


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (CudaRing, "_start_copy", _copy_at_once),
        (CudaRing, "_start_copy", _copy_on_a_new_stream),
        (CudaRing, "_wait", _do_not_wait),
        (Stream, "wait_stream", _do_not_wait),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(owner: type, method: str, broken: Callable[..., Any]) -> None:
    runs, order = [[0, 1, 2, 3], [3, 1, 0]], [0, 0, 1, 0, 1, 1, 0]
    with mock.patch.object(owner, method, broken):
        assert any(_wrong_reads(seed, 2, runs, order) for seed in range(40))


def _fail_in_a_run(ring: CudaRing) -> None:
    with ring.run("first", GatherSignature(slots=2)):
        ring.prefetch([BANKS[0].shard], BANKS[0].spec, 0, None)
        raise ZeroDivisionError


def test_an_interrupted_run_leaves_a_quiet_ring() -> None:
    with FakeCuda(random.Random(0)).installed() as cuda:
        ring = CudaRing(2, SLOT_BYTES, CPU, Link(), debug=True)
        with pytest.raises(ZeroDivisionError):
            _fail_in_a_run(ring)
        assert cuda.is_idle


def test_links_are_not_emulated_on_a_gpu() -> None:
    with pytest.raises(OptionError, match="exists for device cpu only"):
        CudaRing(2, SLOT_BYTES, torch.device("cuda", 0), parse_link("emulate:1e9"))
