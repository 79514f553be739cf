"""Shards on GPUs: every rank keeps 1/N of each bank in its GPU's memory, from which the other GPUs copy.

torch's symmetric memory maps the memory of all ranks into the addresses of each GPU, so a copy from another rank is an
ordinary copy on the ring's own stream: no rank takes part in what another one copies. By CUDA's rules for memory that
was mapped from another process, it stays for as long as anybody has it mapped, as shared memory of the host does.

Two ranks on one H100 have run it; how fast GPUs copy from each other is unmeasured.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed import DistError, ProcessGroup

from moepass.models.errors import InputError
from moepass.models.homes import COLLECTIVE
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.device_collective import DeviceCollectiveTransport
from moepass.runtime.homes.peer_home import GatherPacker, PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.device_links import check_nccl
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.environment import environment_variable
from moepass.runtime.system.shared_memory import SharedMemoryError, SharedSegment, in_pages
from moepass.runtime.torch_private import store_of
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.streams import with_index
from moepass.runtime.transfer.transports import Transport

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class RankMemory(Protocol):
    """Memory of equal size on all ranks, each of which can read that of the others."""

    # The kind of device on which it is.
    device_type: str

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's, flat uint8. Raises SharedMemoryError where there is none."""

    def exchange(self) -> tuple[Sequence[torch.Tensor], object]:
        """That of all ranks by rank, and what keeps that of others: without it they must not be read any more.

        All ranks come here. Raises PeerError where some do not, SharedMemoryError where their memory cannot be read.
        """

    def finish_writing(self) -> None:
        """Return when what was written to this rank's can be read by others."""

    def with_own_storage(self, memory: torch.Tensor, when_freed: Callable[[], None]) -> torch.Tensor:
        """The same bytes of this rank's, flat uint8; `when_freed` is called once nobody has them in this way."""


class SymmetricMemory:
    """`RankMemory` on the CUDA device of each rank of `group`, which must all be on one machine, and different."""

    device_type = "cuda"

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._own: torch.Tensor | None = None
        # Until the exchange: nothing that is kept longer may keep it.
        self._group: ProcessGroup | None = group

    def allocate(self, nbytes: int) -> torch.Tensor:
        from torch._C._distributed_c10d import _SymmetricMemory

        backend = _SymmetricMemory.get_backend(self._device)
        if backend != "CUDA":
            raise SharedMemoryError(
                f"torch's symmetric memory uses {backend}, from which ranks cannot pull experts; unset TORCH_SYMMMEM",
                name="TORCH_SYMMMEM",
                value=backend,
                expected="CUDA",
            )
        # It does not come from torch's allocator, which may hold what is free.
        torch.cuda.empty_cache()
        try:
            # Not `symmetric_memory.empty`: memory of a pool may be another tensor's while ranks still read it.
            self._own = _SymmetricMemory.empty_strided_p2p([nbytes], [1], torch.uint8, self._device)
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{self._device} has no {nbytes} bytes for other GPUs to read: {error}",
                name=str(self._device),
                value=nbytes,
            ) from error
        return self._own

    def exchange(self) -> tuple[list[torch.Tensor], object]:
        import torch.distributed._symmetric_memory as symmetric_memory

        own, group = self._own, self._group
        assert own is not None, "allocate comes first"
        assert group is not None, "memory is exchanged once"
        self._own, self._group = None, None
        try:
            # Setting up multicast blocks until all GPUs behind the switch have joined. torch reads this on each call.
            with _waiting_at_most(group, self._timeout_s), environment_variable(_NO_MULTICAST, "1"):
                handle = symmetric_memory.rendezvous(own, group)
        except RuntimeError as error:
            if isinstance(error, DistError) or "imeout" in str(error):
                raise PeerError(f"a rank did not come to share its GPU's memory: {error}") from error
            raise SharedMemoryError(
                f"the GPUs of the ranks cannot read each other's memory: {error}; each rank needs a GPU of its own, "
                "chosen by torch.cuda.set_device from GPUs that all ranks see (one CUDA_VISIBLE_DEVICES), on one "
                "machine, with peer access to the others; else experts can stream from host memory only (home='host')"
            ) from error
        # Torch's tensors of what other ranks have keep nothing.
        return [
            own if rank == group.rank() else handle.get_remote_tensor(rank, own.shape, own.dtype)
            for rank in range(group.size())
        ], handle

    def finish_writing(self) -> None:
        torch.cuda.synchronize(self._device)

    def with_own_storage(self, memory: torch.Tensor, when_freed: Callable[[], None]) -> torch.Tensor:
        exported = _Exported(memory)
        weakref.finalize(exported, when_freed).atexit = False
        return torch.as_tensor(exported, device=self._device)


class _Exported:
    """Memory of this rank's GPU, flat uint8, as libraries hand it to each other: whoever takes it keeps this object.

    (Not for memory of other GPUs: torch would take it for a tensor on that GPU, or copy it.)
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 2,
        }  # fmt: skip


@contextmanager
def _waiting_at_most(group: ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Torch's own wait is that of the group's store: 10 minutes, or 30."""
    store = store_of(group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)


class DevicePacker(PeerPacker):
    """As `PeerPacker`, with shards in memory that `make_memory` makes: for all banks at once, so that what can fail
    leaves the model as it is, or `bank_by_bank`, so that what is moved into a shard makes room for the next one.

    The segment of shared memory is there for goodbyes alone.
    """

    is_copied_on_write = False

    def __init__(
        self,
        group: PeerGroup,
        transport: Transport,
        make_memory: Callable[[], RankMemory],
        bank_by_bank: bool = False,
    ) -> None:
        super().__init__(group, transport)
        self.device_type = make_memory().device_type
        self._make_memory = make_memory
        self._is_bank_by_bank = bank_by_bank
        self._taken: dict[int, _TakenShards] = {}

    def tensors_in_shard(
        self, index: int, positions: Sequence[int], when_freed: Callable[[], None]
    ) -> list[torch.Tensor]:
        shard, places = self._memory(index), self.parameters(index)
        return [
            self._taken[index]
            .memory.with_own_storage(shard.narrow(0, part.offset_bytes, part.nbytes), when_freed)
            .view(part.torch_dtype)
            .view(part.shape)
            for part in (places[position] for position in positions)
        ]

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        for memory in {id(taken.memory): taken.memory for taken in self._taken.values()}.values():
            memory.finish_writing()
        return super().spread(banks)

    def _reserve(self) -> None:
        self._segment = self.group.make_segment(0)
        if not self._is_bank_by_bank:
            self._take(range(len(self._specs)))

    def _take(self, indices: Sequence[int]) -> None:
        """Take memory for these banks, and exchange it: all ranks come here."""
        size, memory = self.group.size, self._make_memory()
        layouts = [[shard_layout(self._specs[index], rank).nbytes for index in indices] for rank in range(size)]
        places = [[0, *itertools.accumulate(map(in_pages, of_rank))] for of_rank in layouts]
        own = memory.allocate(max(of_rank[-1] for of_rank in places))
        self.group.check_alive()
        memories, keeps = memory.exchange() if size > 1 else ([own], None)
        for number, index in enumerate(indices):
            shards = [memories[rank].narrow(0, places[rank][number], layouts[rank][number]) for rank in range(size)]
            if not shards[self.group.rank].numel():
                # A storage of its own, by which the bank is known.
                shards[self.group.rank] = torch.empty_like(own[:0])
            self._taken[index] = _TakenShards(shards, memory, keeps)

    def _memory(self, index: int) -> torch.Tensor:
        if index not in self._taken:
            self._take([index])
        return self._taken[index].shards[self.group.rank]

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        return [self._taken[index].shards[rank] for index in range(len(self._specs))]

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        keeps = self._taken[self._specs.index(spec)].keeps
        return MemorySource(shard, shard_pieces(spec, rank), rank != self.group.rank, keeps=keeps)


@dataclasses.dataclass(frozen=True)
class _TakenShards:
    """The shards of one bank by rank, the memory that this rank's lies in, and what keeps those of the others."""

    shards: Sequence[torch.Tensor]
    memory: RankMemory
    keeps: object


def packer_on(
    device: torch.device,
    process_group: ProcessGroup,
    group: PeerGroup,
    transport: Transport,
    bank_by_bank: bool = False,
) -> PeerPacker:
    """Brings banks to the ranks of `group`, which are those of `process_group`, for copies by `transport` to `device`,
    which `check_transport_to` lets pass. `bank_by_bank`: see `DevicePacker`; elsewhere memory is taken so anyway.
    """
    if isinstance(transport, CollectiveTransport):
        return GatherPacker(group, transport, device)
    if device.type == "cpu":
        return PeerPacker(group, transport)
    timeout_s = group.rendezvous.timeout_s
    return DevicePacker(group, transport, lambda: SymmetricMemory(process_group, device, timeout_s), bank_by_bank)


def make_transport(name: str, link: Link, device: torch.device) -> Transport:
    """The transport with that name, of a home that each rank reads from the others, to `device`, as for `packer_on`."""
    if name != COLLECTIVE:
        return Transport(name)
    return CollectiveTransport(link) if device.type == "cpu" else DeviceCollectiveTransport(link, with_index(device))


def check_transport_to(device: torch.device, transport: str) -> None:
    """Raises InputError where no experts of other ranks come to `device` by that transport."""
    kinds = ("cpu", "cuda")
    if device.type not in kinds:
        raise InputError(
            f"device is {device}; transport={transport!r} brings experts of other ranks to {' and '.join(kinds)} only "
            "so far",
            name="device",
            value=str(device),
            expected=kinds,
        )
    if device.type == "cuda" and transport == COLLECTIVE:
        check_nccl(device)
