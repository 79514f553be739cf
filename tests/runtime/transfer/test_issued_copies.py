"""Copies that a thread issues to a stream, from files through bounce buffers, on an emulated CUDA."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import moepass
from moepass.models.errors import CheckpointError
from moepass.passes.ir.shards import Piece
from moepass.passes.ir.timeline import COMPUTE, COPY
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.disk.disk_files import DiskFile, FileSource
from moepass.runtime.homes.disk.disk_home import DiskHome
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.copying import CopyError, SlotCopy
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.lanes import BounceBuffer, StreamLane
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_copier
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.late_thread import LateTransport
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks, small_bank

CPU = torch.device("cpu")
BANKS = [small_bank(index) for index in range(5)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> DiskHome:
    path = tmp_path_factory.mktemp("banks") / "banks.safetensors"
    save_file({bank.spec.name: bank.shard for bank in BANKS}, path)
    file, disk = DiskFile(path), DiskHome()
    for bank in BANKS:
        offset = file.header.tensors[bank.spec.name].offset_bytes
        disk.add(bank.spec, [FileSource(file, (Piece(offset, 0, bank.spec.format.slot_bytes),))])
    return disk


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    """Cut banks into several slices, and use ordinary memory as pinned memory, which the emulated device lacks."""

    def memory(nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)

    with (
        mock.patch.object(lanes, "SLICE_BYTES", 64),
        mock.patch.object(lanes, "pinned_memory", memory),
    ):
        yield


def _ring(home: DiskHome, slots: int, seed: int) -> Ring:
    transport = LateTransport(random.Random(seed))
    ring = Ring(slots, SLOT_BYTES, CPU, Copier(StreamLane(CPU), transport, transport.copy_thread(Link())), home)
    ring.debug = True
    return ring


def _wrong_reads(home: DiskHome, seed: int, slots: int, runs: Sequence[Sequence[int]], order: Sequence[int]) -> int:
    wrong: list[str] = []

    def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, bank):
            wrong.append(bank.spec.name)

    with FakeCuda(random.Random(seed)).installed() as cuda:
        ring = _ring(home, slots, seed)

        def read(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
            cuda.issue(functools.partial(check, tuple(map(cuda.memory.unowned, tensors)), bank))

        for number in order:
            run_banks(ring, number, [BANKS[index] for index in runs[number % len(runs)]], slots, read)
        del ring
        # Allocate the memory of the slots again.
        memories = [cuda.empty(SLOT_BYTES) for _ in range(6)]
        for memory in memories:
            memory.fill_(0x55)
        cuda.finish()
    return len(wrong) + sum(int((memory != 0x55).any()) for memory in memories)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    slots=st.integers(1, 4),
    runs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=6),
)
def test_every_bank_is_read_correctly_from_its_file(
    home: DiskHome, seed: int, slots: int, runs: list[list[int]], order: list[int]
) -> None:
    assert _wrong_reads(home, seed, slots, runs, order) == 0


def _do_not_wait_for_the_slot(copy: SlotCopy, *arguments: Any) -> None:
    _make_copy(copy, *arguments)
    copy.after = None


def _use_full_buffers(lane: StreamLane) -> BounceBuffer:
    if lane._bounce:
        lane._bounce[-1].emptied = None
    return _empty_buffer(lane)


def _keep_nothing(*arguments: object) -> None:
    pass


def _wait_for_nothing(copier: Copier, filled: Any, statistics: object) -> Callable[[], float]:
    return lambda: 0.0


_make_copy, _empty_buffer = SlotCopy.__init__, StreamLane._empty_buffer


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (SlotCopy, "__init__", _do_not_wait_for_the_slot),
        (StreamLane, "_empty_buffer", _use_full_buffers),
        (Copier, "wait", _wait_for_nothing),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(
    home: DiskHome, owner: type, method: str, broken: Callable[..., Any]
) -> None:
    runs, order = [[0, 1, 2, 3], [3, 1, 0]], [0, 0, 1, 0, 1, 1, 0]
    with mock.patch.object(owner, method, broken):
        assert any(_wrong_reads(home, seed, 2, runs, order) for seed in range(120))


def test_running_copies_keep_their_memory_when_a_model_is_deleted(home: DiskHome) -> None:
    """The copy thread itself may delete the ring, and it cannot wait for its own copies."""
    runs, order = [[0, 1, 2, 3]], [0, 0, 0]
    with mock.patch.object(Copier, "close"):
        assert all(_wrong_reads(home, seed, 2, runs, order) == 0 for seed in range(5))
        # A mock would keep its arguments.
        with (
            mock.patch.object(StreamLane, "keep", _keep_nothing),
            mock.patch.object(StreamLane, "__del__", _keep_nothing),
        ):
            assert any(_wrong_reads(home, seed, 2, runs, order) for seed in range(120))


class _Unreadable(FileSource):
    def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
        raise CheckpointError("it was changed", path=Path("changed"))


def test_a_read_error_is_raised_by_the_acquire(home: DiskHome) -> None:
    bank = BANKS[0].spec
    (source,) = home.sources(bank, ())
    assert isinstance(source, FileSource)
    broken = DiskHome()
    broken.add(bank, [_Unreadable(source.file, source.pieces)])
    with FakeCuda(random.Random(0)).installed() as cuda:
        ring = _ring(broken, 2, seed=0)
        with pytest.raises(CopyError, match=r"layers.0 could not be copied into its slot: it was changed"):
            run_banks(ring, 0, BANKS[:1], 2, lambda *read: None)
        assert cuda.is_idle
        ring.home = home
        run_banks(ring, 0, BANKS[:1], 2, lambda *read: None)
        del ring
        gc.collect()  # the error has kept it


def test_reads_and_waits_are_timed_by_events(home: DiskHome) -> None:
    with FakeCuda(random.Random(0)).installed() as cuda, moepass.record_timeline() as recording:
        recording.begin_run(torch.device("cuda", 0))
        ring = _ring(home, 1, seed=0)
        run_banks(ring, 0, BANKS[:3], 1, lambda *read: None)
        cuda.finish()
        statistics = ring.statistics
        del ring
    timeline = recording.timeline
    assert [event.layer for event in timeline.on(COMPUTE)] == [bank.spec.name for bank in BANKS[:3]]
    assert {event.layer for event in timeline.on(COPY)} == {bank.spec.name for bank in BANKS[:3]}
    assert statistics.waited_seconds == pytest.approx(timeline.seconds("wait"))
    assert statistics.link_bytes == sum(bank.shard.numel() for bank in BANKS[:3])


@pytest.mark.parametrize("kind", [DiskHome, Home])
def test_only_homes_that_need_the_host_have_a_copy_thread(kind: type[Home]) -> None:
    with FakeCuda(random.Random(0)).installed():
        copier = make_copier(torch.device("cuda", 0), Link(), kind())
    assert (copier._thread is not None) == (kind is DiskHome)
