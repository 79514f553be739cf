"""Shards on GPUs: every rank keeps 1/N of each bank in its GPU's memory, from which the other GPUs copy.

torch's symmetric memory maps the memory of all ranks into the addresses of each GPU, so a copy from another rank is an
ordinary copy on the ring's own stream: no rank takes part in what another one copies. By CUDA's rules for memory that
was mapped from another process, it stays for as long as anybody has it mapped, as shared memory of the host does.

Unmeasured: tests run all of this with memory of another kind, and `SymmetricMemory` has not been on a GPU yet.
"""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.distributed import DistError, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from moepass.models.errors import InputError
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.peer_home import PeerPacker, packer_for
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedMemoryError, SharedSegment
from moepass.runtime.transfer.sources import MemorySource, Source
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
                f"torch's symmetric memory is that of {backend}, by which ranks pull no experts; unset TORCH_SYMMMEM"
            )
        # It does not come from torch's allocator, which may hold what is free.
        torch.cuda.empty_cache()
        try:
            # Not `symmetric_memory.empty`: memory of a pool may be another tensor's while ranks still read it.
            self._own = _SymmetricMemory.empty_strided_p2p([nbytes], [1], torch.uint8, self._device)
        except RuntimeError as error:
            raise SharedMemoryError(f"{self._device} has no {nbytes} bytes for other GPUs to read: {error}") from error
        return self._own

    def exchange(self) -> tuple[list[torch.Tensor], object]:
        import torch.distributed._symmetric_memory as symmetric_memory

        own, group = self._own, self._group
        assert own is not None, "allocate comes first"
        assert group is not None, "memory is exchanged once"
        self._own, self._group = None, None
        try:
            with _waiting_at_most(group, self._timeout_s), _without_multicast():
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
    store = c10d._get_process_group_store(group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Nothing here multicasts, and to prepare it blocks until all GPUs of a switch have joined. Read at each call."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        del os.environ[_NO_MULTICAST]
        if before is not None:
            os.environ[_NO_MULTICAST] = before


class DevicePacker(PeerPacker):
    """As `PeerPacker`, with shards in `memory`. The segment of shared memory is there for goodbyes alone."""

    is_copied_on_write = False

    def __init__(self, group: PeerGroup, transport: Transport, memory: RankMemory) -> None:
        super().__init__(group, transport)
        self.device_type = memory.device_type
        self._memory_of_ranks = memory
        self._all: Sequence[torch.Tensor] = ()
        self._keeps: object = None

    def tensors_in_shard(
        self, index: int, positions: Sequence[int], when_freed: Callable[[], None]
    ) -> list[torch.Tensor]:
        shard, tensors = self._memory(index), self.layout(index).tensors
        return [
            self._memory_of_ranks.with_own_storage(shard.narrow(0, part.offset_bytes, part.nbytes), when_freed)
            .view(part.torch_dtype)
            .view(part.shape)
            for part in (tensors[position] for position in positions)
        ]

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        self._memory_of_ranks.finish_writing()
        return super().spread(banks)

    def _reserve(self) -> None:
        """Before any expert is packed: what can fail leaves the model as it is."""
        self._segment = self.group.make_segment(0)
        size = self.group.size
        own = self._memory_of_ranks.allocate(max(self._places(rank)[-1] - PAGE_BYTES for rank in range(size)))
        self.group.check_alive()
        self._all, self._keeps = self._memory_of_ranks.exchange() if size > 1 else ([own], None)

    def _memory(self, index: int) -> torch.Tensor:
        return self._shards(self.group.rank)[index]

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        return self._shards(rank)

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        return MemorySource(shard, shard_pieces(spec, rank), rank != self.group.rank, keeps=self._keeps)

    def _shards(self, rank: int) -> list[torch.Tensor]:
        places = [place - PAGE_BYTES for place in self._places(rank)]
        return [
            self._all[rank].narrow(0, place, shard_layout(spec, rank).nbytes)
            for place, spec in zip(places, self._specs, strict=False)
        ]


def packer_on(device: torch.device, process_group: ProcessGroup, group: PeerGroup, transport: Transport) -> PeerPacker:
    """Brings banks to the ranks of `group`, which are those of `process_group`, for copies by `transport` to `device`,
    which `check_transport_to` lets pass.
    """
    if device.type == "cpu":
        return packer_for(group, transport)
    memory = SymmetricMemory(process_group, device, group.rendezvous.timeout_s)
    return DevicePacker(group, transport, memory)


def check_transport_to(device: torch.device, transport: str) -> None:
    """Raises InputError where no experts of other ranks come to `device` by that transport yet."""
    kinds = ["cpu", "cuda"] if transport == PULL else ["cpu"]
    if device.type not in kinds:
        instead = f"; use transport={PULL!r} there" if device.type == "cuda" else ""
        raise InputError(
            f"device is {device}; transport={transport!r} brings experts of other ranks to {' and '.join(kinds)} only "
            f"so far{instead}"
        )
