"""Transport `collective` on CUDA: real ranks, each with an emulated CUDA, and gloo on its streams in place of NCCL."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

import moepass
from moepass.models.errors import InputError
from moepass.runtime.banks import banks
from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.homes.collective import DeviceCollectiveTransport
from moepass.runtime.homes.options.packers import make_packer
from moepass.runtime.homes.peer_home import GatherPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.offload import offload
from moepass.runtime.ranks.connections import Connections
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import NcclLinks, TensorsByRank
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from moepass.runtime.transfer.copier import Copier
from moepass.runtime.transfer.copying import SlotCopy
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.lanes import StreamLane
from moepass.runtime.transfer.learned_order import Fetch
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_copier
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.executor_calls import compiled_executor, forget_rings
from tests.helpers.processes.fake_cuda import FakeCuda
from tests.helpers.processes.late_thread import LateThread
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.processes.ring_runs import SLOT_BYTES, holds, run_banks
from tests.helpers.processes.workers import Worker, join_group

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
EXPERTS = 5
SCRATCH = 7


def _whole_bank(index: int) -> Bank:
    """Return a bank of at most SLOT_BYTES with all experts, in which all numbers are different."""
    up = torch.arange(EXPERTS * 20.0).reshape(EXPERTS, 20) + 1000 * index
    return pack_bank(index, f"layers.{index}", {"up": up, "down": -up[:, :3]}, home="host")


@dataclasses.dataclass
class _Emulation:
    """The emulated CUDA of this rank; `random` decides how late its copy thread is."""

    random: random.Random
    cuda: FakeCuda | None = None


class _Links(NcclLinks):
    """Links by gloo, which move bytes when a separate stream reaches them, as NCCL does in torch."""

    def __init__(self, rendezvous: Rendezvous, emulation: _Emulation) -> None:
        self._connections = Connections(rendezvous, "devices", "emulated NCCL")
        self._emulation = emulation
        self._streams: dict[FakeCuda, Any] = {}

    def exchange(self, send: TensorsByRank, receive: TensorsByRank) -> None:
        cuda = self._emulation.cuda
        assert cuda is not None
        stream = self._streams.setdefault(cuda, cuda.stream())
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        send, receive = tree_map_only(torch.Tensor, cuda.memory.unowned, (dict(send), dict(receive)))
        with cuda.on(stream):
            deadline = time.monotonic() + 50
            cuda.issue(lambda: self._connections.exchange(receive, send, deadline, "is late", "emulating"))
        current.wait_stream(stream)

    def abort(self) -> None:
        pass


class _Group(DeviceGatherGroup):
    """A gather group whose host tensors are not work for the emulated device. None: all memory is host memory."""

    emulation: _Emulation

    def ask(self, *arguments: Any) -> dict[int, bool]:
        with _disable_current_modes():
            return super().ask(*arguments)

    def gather(self, *arguments: Any, **more: Any) -> None:
        if self.emulation.cuda is None:
            GatherGroup.gather(self, *arguments, **more)
        else:
            super().gather(*arguments, **more)

    def _wait_together(self, *arguments: Any) -> None:
        with _disable_current_modes():
            super()._wait_together(*arguments)


class _Transport(DeviceCollectiveTransport):
    def __init__(self, emulation: _Emulation) -> None:
        super().__init__(Link(), CPU, lambda rendezvous, device: _Links(rendezvous, emulation))
        self._emulation = emulation
        self._copies = LateThread(emulation.random)

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> DeviceGatherGroup:
        group = _Group(rendezvous, describe, self._device, self._connect)
        group.emulation = self._emulation
        return group


@contextlib.contextmanager
def _cuda(emulation: _Emulation, seed: int) -> Iterator[FakeCuda]:
    with FakeCuda(random.Random(seed)).installed() as cuda:
        emulation.cuda = cuda

        def sleep(seconds: float) -> None:
            if cuda._ready():
                cuda.run_one()

        with mock.patch.object(time, "sleep", sleep):
            yield cuda
    emulation.cuda = None


def _spread(emulation: _Emulation, wholes: Sequence[Bank]) -> tuple[GatherPacker, list[Bank]]:
    """Return this rank's packer and banks, connected to all other ranks."""
    packer = GatherPacker(PeerGroup.of(None, 50, transport="collective"), _Transport(emulation), CPU)
    tensors = {
        bank.spec.name: dict(zip([tensor.name for tensor in bank.spec.tensors], bank.views(bank.shard), strict=True))
        for bank in wholes
    }
    packer.agree(tensors)
    banks = [packer.pack(index, name, of_bank) for index, (name, of_bank) in enumerate(tensors.items())]
    packer.connect(banks)
    return packer, banks


def _wrong_reads(seeds: int, order: list[int]) -> int:
    """Return the number of wrong reads in runs over four banks, which begin with the banks in `order`.

    In every third run one rank has no work.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    emulation = _Emulation(random.Random(rank))
    wholes = [_whole_bank(index) for index in range(5)]
    packer, banks = _spread(emulation, wholes)
    transport = packer.home.transport
    assert isinstance(transport, DeviceCollectiveTransport)
    wrong: list[str] = []

    def check(tensors: tuple[torch.Tensor, ...], bank: Bank) -> None:
        if not holds(tensors, wholes[bank.spec.index]):
            wrong.append(bank.spec.name)

    for seed in range(seeds):
        slots = 1 + seed % 3
        with _cuda(emulation, ranks * seed + rank) as cuda:
            ring = Ring(
                slots, SLOT_BYTES, CPU, Copier(StreamLane(CPU), transport, transport.copy_thread(Link())), packer.home
            )
            ring.debug = True

            def read(tensors: tuple[torch.Tensor, ...], bank: Bank, cuda: FakeCuda = cuda) -> None:
                cuda.issue(functools.partial(check, tuple(map(cuda.memory.unowned, tensors)), bank))

            for number, first in enumerate(order):
                of_run = [banks[(first + step) % len(banks)] for step in range(4)]
                if number % 3 == 2 and rank == seed % ranks:
                    transport._runs.clear()  # this run differs from the last one
                    transport.join([bank_in_run.spec for bank_in_run in of_run])
                else:
                    run_banks(ring, first, of_run, slots, read)
            wrong += _wrong_bytes(cuda, transport, packer, banks[0], wholes[0])
            del ring
            # Other tensors reuse the memory of the slots.
            memories = [cuda.empty(SLOT_BYTES) for _ in range(4)]
            for memory in memories:
                memory.fill_(0x55)
            cuda.finish()
            wrong += ["slot" for memory in memories if (memory != 0x55).any()]
            transport.__dict__.pop("_lane", None)
    return len(wrong)


def _bytes(bank: Bank) -> int:
    return bank.spec.format.link_bytes


def _wrong_bytes(
    cuda: FakeCuda, transport: DeviceCollectiveTransport, packer: GatherPacker, bank: Bank, whole: Bank
) -> list[str]:
    """Return the number of wrong bytes that eager code reads, into memory that the computation used before."""
    scratch = cuda.empty(_bytes(bank))
    for _ in range(5):
        scratch.fill_(SCRATCH)
    del scratch
    gathered = transport.read(bank.spec, packer.home.sources(bank.spec, []), 0, _bytes(bank), CPU)
    cuda.finish()
    with _disable_current_modes():
        found_tensors = tuple(tensor.view(gathered) for tensor in bank.spec.tensors)
        return [] if holds(found_tensors, whole) else ["read"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_bank_is_read_correctly(ranks: int) -> None:
    """Five experts give shards of different sizes."""
    assert run_ranks(ranks, _wrong_reads, 4, [0, 0, 3, 1, 2]) == [0] * ranks


def _ring_of_streams(slots: int, slot_bytes: int, device: torch.device, link: Link, home: Home) -> Ring:
    return Ring(
        slots, slot_bytes, device, Copier(StreamLane(device), home.transport, home.transport.copy_thread(link)), home
    )


def _runs_that_differ(seeds: int) -> int:
    """Return the number of outputs of a compiled model that differ from those of the original."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    emulation = _Emulation(random.Random(rank))
    torch.manual_seed(0)
    model = Stack("dense_bmm", depth=3, bias=True)
    inputs = tokens(seed=rank)
    packer = GatherPacker(PeerGroup.of(None, 50, transport="collective"), _Transport(emulation), CPU)
    differ = 0
    with torch.no_grad():
        expected = model(inputs)
        with mock.patch.object(offload, "make_packer", return_value=packer):
            store = moepass.offload_experts(model, home=moepass.Peer(transport="collective", timeout_s=50)).store
        executor, arguments = compiled_executor(model, inputs)
        for seed in range(seeds):
            with _cuda(emulation, ranks * seed + rank) as cuda:
                with mock.patch.object(banks, "make_ring", _ring_of_streams):
                    store.current_ring = None
                    ring = store.ring(debug=True)
                forget_rings(executor)
                outputs = [executor([*arguments])[0] for _ in range(3)]
                cuda.finish()
                assert ring.statistics.copies == 9
                del ring
                store.current_ring = None
            differ += sum(not torch.equal(output, expected) for output in outputs)
    return differ


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_compiled_model_stays_exact(seeds: int) -> None:
    assert run_ranks(2, _runs_that_differ, seeds) == [0, 0]


def _do_not_wait_for_the_slot(copier: Copier, fetch: Fetch, target: torch.Tensor, *arguments: object) -> SlotCopy:
    return _submit(copier, fetch, target, None)


def _do_not_wait_for_the_memory(transport: Any, *arguments: Any) -> SlotCopy:
    gather: SlotCopy = _gather_now(transport, *arguments)
    gather.after = None
    return gather


_submit: Any = Copier.submit
_gather_now: Any = DeviceCollectiveTransport._gather_now


def _wrong_reads_without(owner: type, method: str, broken: Callable[..., Any]) -> int:
    with mock.patch.object(owner, method, broken):
        return _wrong_reads(12, [0, 1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Copier, "submit", _do_not_wait_for_the_slot),
        (DeviceCollectiveTransport, "_gather_now", _do_not_wait_for_the_memory),
    ],
)
def test_the_emulation_notices_an_order_that_is_missing(owner: type, method: str, broken: Callable[..., Any]) -> None:
    assert sum(run_ranks(2, _wrong_reads_without, owner, method, broken)) > 0


def _chooses() -> tuple[str, bool]:
    with mock.patch.object(dist, "is_nccl_available", return_value=True):
        packer = make_packer(moepass.Peer(transport="collective", timeout_s=50), GPU)
    home = Home()
    home.transport = packer.home.transport
    with mock.patch.object(torch.cuda, "Stream"):
        copier = make_copier(GPU, Link(), home)
    return type(packer.home.transport).__name__, copier._thread is not None


def test_banks_are_gathered_on_the_gpu_where_a_gpu_computes() -> None:
    assert run_ranks(1, _chooses) == [("DeviceCollectiveTransport", True)]


def _has_no_nccl() -> None:
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=False),
        refused(InputError, name="transport", value="collective", expected="pull"),
    ):
        make_packer(moepass.Peer(transport="collective", timeout_s=50), GPU)


def test_a_torch_without_nccl_is_an_error_before_anything_moves() -> None:
    run_ranks(1, _has_no_nccl)


class _Never:
    """The event of a gather that does not end."""

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return False


def _gather_without_end(connection: Connection, store: str, rank: int) -> None:
    join_group(store, rank, 2)
    meeting = PeerGroup.of(None, 1.0, transport="collective").rendezvous
    group = DeviceGatherGroup(meeting, lambda request: "bank layers.0", CPU, lambda *_: mock.Mock())
    group.ask((0, 0, 8), True)
    connection.send("all ranks have come")
    with mock.patch.multiple(torch.cuda, Event=_Never, current_stream=mock.Mock()):
        try:
            group.gather((0, 0, 8), {}, {})
        except PeerError as error:
            connection.send(str(error))


def test_a_rank_that_is_killed_in_a_gather_is_named_within_the_timeout(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Worker(_gather_without_end, store, 0) as first, Worker(_gather_without_end, store, 1) as killed:
        assert {worker.hear() for worker in (first, killed)} == {"all ranks have come"}
        killed.kill()
        assert first.hear().startswith(
            "rank 1 has ended or dropped its model: the connection to it (transport 'collective')"
        )
