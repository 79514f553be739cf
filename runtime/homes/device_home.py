"""Home `peer` on GPUs: every rank stores 1/N of each bank in its GPU's memory, and the other GPUs copy from there.

By CUDA's rules, memory that another process has mapped stays allocated until that process unmaps it, as host shared
memory does. Two ranks on one H100 have run it; the speed of copies between GPUs is unmeasured.
"""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed import DistError, ProcessGroup

from moepass.models.errors import InputError
from moepass.models.homes import COLLECTIVE
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.collective import CollectiveTransport, DeviceCollectiveTransport
from moepass.runtime.homes.peer_home import GatherPacker, PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.device_links import check_nccl
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.processes import environment_variable
from moepass.runtime.system.shared_memory import SharedMemoryError, SharedSegment, in_pages
from moepass.runtime.torch_private import store_of
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, Source

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class SymmetricMemory:
    """Memory of equal size on the CUDA devices of the ranks of `group`. Each rank can read the memory of all ranks.

    All ranks are on one machine, and no two on the same device.
    """

    device_type = "cuda"

    def __init__(self, group: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._own: torch.Tensor | None = None
        # Released by the exchange: long-lived objects must not keep the group alive.
        self._group: ProcessGroup | None = group

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return this rank's memory, flat uint8. Raises SharedMemoryError for another backend or too little memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        backend = _SymmetricMemory.get_backend(self._device)
        if backend != "CUDA":
            text = (
                f"torch's symmetric memory uses backend {backend}, but ranks can pull experts only with CUDA; unset "
                "TORCH_SYMMMEM"
            )
            raise SharedMemoryError(text, name="TORCH_SYMMMEM", value=backend, expected="CUDA")
        # This memory does not come from torch's caching allocator, which may hold all free memory.
        torch.cuda.empty_cache()
        try:
            # `symmetric_memory.empty` uses a pool, which may reuse memory while ranks still read it.
            self._own = _SymmetricMemory.empty_strided_p2p([nbytes], [1], torch.uint8, self._device)
        except RuntimeError as error:
            text = f"{self._device} cannot allocate {nbytes} bytes for other GPUs to read: {error}"
            raise SharedMemoryError(text, name=str(self._device), value=nbytes) from error
        return self._own

    def exchange(self) -> tuple[list[torch.Tensor], object]:
        """Return the memory of all ranks, and an object that must live as long as it is read. All ranks call this once.

        Raises PeerError if some ranks do not call it, and SharedMemoryError if their memory cannot be read.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        memory, group = self._own, self._group
        assert memory is not None, "allocate comes first"
        assert group is not None, "memory is exchanged once"
        self._own, self._group = None, None
        try:
            # Setting up multicast blocks until all GPUs behind the switch have joined. torch reads this on each call.
            with _waiting_at_most(group, self._timeout_s), environment_variable(_NO_MULTICAST, "1"):
                handle = symmetric_memory.rendezvous(memory, group)
        except RuntimeError as error:
            if isinstance(error, DistError) or "imeout" in str(error):
                raise PeerError(f"a rank did not respond when GPUs shared their memory: {error}") from error
            raise SharedMemoryError(
                f"the GPUs of the ranks cannot read each other's memory: {error}; each rank needs its own GPU, "
                "chosen by torch.cuda.set_device from GPUs that all ranks see (one CUDA_VISIBLE_DEVICES), on one "
                "machine, with peer access to the others; without that, use home='host'"
            ) from error
        # Tensors over the memory of other ranks do not keep it mapped; the handle does.
        return [
            memory if rank == group.rank() else handle.get_remote_tensor(rank, memory.shape, memory.dtype)
            for rank in range(group.size())
        ], handle

    def finish_writing(self) -> None:
        """Block until other ranks can read everything that was written to this rank's memory."""
        torch.cuda.synchronize(self._device)

    def with_own_storage(self, memory: torch.Tensor, when_freed: Callable[[], None]) -> torch.Tensor:
        """Return a tensor over the same bytes with a separate storage. Freeing that storage calls `when_freed`."""
        exported = _Exported(memory)
        weakref.finalize(exported, when_freed).atexit = False
        return torch.as_tensor(exported, device=self._device)


class _Exported:
    """This rank's GPU memory, flat uint8, with the CUDA array interface. A tensor made from it keeps this object alive.

    Memory of other GPUs cannot be exported this way: torch would take it for memory of this GPU, or copy it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 2,
        }  # fmt: skip


@contextmanager
def _waiting_at_most(group: ProcessGroup, timeout_s: float) -> Iterator[None]:
    """Limit torch's wait to `timeout_s`. By default it is the timeout of the group's store, 10 or 30 minutes."""
    store = store_of(group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)


class DevicePacker(PeerPacker):
    """A packer with shards in memory of `make_memory`. Its shared segment only shows whether this rank has left.

    By default it allocates memory for all banks at once, so that a failure leaves the model unchanged. With
    `bank_by_bank` it allocates for one bank at a time, so that moved parameters free memory for the next one.
    """

    is_copied_on_write = False

    def __init__(
        self,
        group: PeerGroup,
        transport: Transport,
        make_memory: Callable[[], SymmetricMemory],
        bank_by_bank: bool = False,
    ) -> None:
        super().__init__(group, transport)
        self.device_type = make_memory().device_type
        self._make_memory, self._is_bank_by_bank = make_memory, bank_by_bank
        # For each bank: the shard of each rank, the memory that contains this rank's shard, and an object that must
        # live as long as the shards of the other ranks are read.
        self._taken: dict[int, tuple[Sequence[torch.Tensor], SymmetricMemory, object]] = {}

    def _tensors_in_shard(
        self, index: int, positions: Sequence[int], when_freed: Callable[[], None]
    ) -> list[torch.Tensor]:
        shard, memory, specs = self._memory(index), self._taken[index][1], self.parameters(index)
        return [
            memory.with_own_storage(shard.narrow(0, spec.offset_bytes, spec.nbytes), when_freed)
            .view(spec.torch_dtype)
            .view(spec.shape)
            for spec in (specs[position] for position in positions)
        ]

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """Return the shards of each bank, by its index, once every rank can read them."""
        for memory in {id(memory): memory for _, memory, _ in self._taken.values()}.values():
            memory.finish_writing()
        return super().spread(banks)

    def _reserve(self) -> None:
        self._segment = self.group.make_segment(0)
        if not self._is_bank_by_bank:
            self._take(range(len(self._specs)))

    def _take(self, indices: Sequence[int]) -> None:
        """Allocate memory for these banks and exchange it. All ranks must call this."""
        size, memory = self.group.size, self._make_memory()
        layouts = [[shard_layout(self._specs[index], rank).nbytes for index in indices] for rank in range(size)]
        offsets = [[0, *itertools.accumulate(map(in_pages, of_rank))] for of_rank in layouts]
        allocated = memory.allocate(max(of_rank[-1] for of_rank in offsets))
        self.group.check_alive()
        memories, keeps = memory.exchange() if size > 1 else ([allocated], None)
        for number, index in enumerate(indices):
            shards = [memories[rank].narrow(0, offsets[rank][number], layouts[rank][number]) for rank in range(size)]
            if not shards[self.group.rank].numel():
                # A bank is identified by its storage, so an empty shard needs one too.
                shards[self.group.rank] = torch.empty_like(allocated[:0])
            self._taken[index] = (shards, memory, keeps)

    def _memory(self, index: int) -> torch.Tensor:
        if index not in self._taken:
            self._take([index])
        return self._taken[index][0][self.group.rank]

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        return [self._taken[index][0][rank] for index in range(len(self._specs))]

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        keeps = self._taken[self._specs.index(spec)][2]
        return MemorySource(shard, shard_pieces(spec, rank), rank != self.group.rank, keeps=keeps)


def packer_on(
    device: torch.device,
    process_group: ProcessGroup,
    group: PeerGroup,
    transport: Transport,
    bank_by_bank: bool = False,
) -> PeerPacker:
    """Return the packer for copies by `transport` to `device`, which `check_transport_to` accepts.

    `group` are the ranks of `process_group`. `DevicePacker` describes `bank_by_bank`; other packers always allocate so.
    """
    if isinstance(transport, CollectiveTransport):
        return GatherPacker(group, transport, device)
    if device.type == "cpu":
        return PeerPacker(group, transport)
    timeout_s = group.rendezvous.timeout_s
    return DevicePacker(group, transport, lambda: SymmetricMemory(process_group, device, timeout_s), bank_by_bank)


def make_transport(name: str, link: Link, device: torch.device) -> Transport:
    """Return the transport `pull` or `collective` to `device`, which `check_transport_to` accepts."""
    if name != COLLECTIVE:
        return Transport(name)
    return CollectiveTransport(link) if device.type == "cpu" else DeviceCollectiveTransport(link, device)


def check_transport_to(device: torch.device, transport: str) -> None:
    """Raise InputError if `transport` cannot copy the experts of other ranks to `device`."""
    kinds = ("cpu", "cuda")
    if device.type not in kinds:
        text = (
            f"device is {device}; transport={transport!r} copies experts of other ranks only to {' and '.join(kinds)}; "
            "use home='host'"
        )
        raise InputError(text, name="device", value=str(device), expected=kinds)
    if device.type == "cuda" and transport == COLLECTIVE:
        check_nccl(device)
