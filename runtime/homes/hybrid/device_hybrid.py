"""Home `hybrid` on GPUs: shards in pinned host memory, staging buffers in memory that the GPUs share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.device_home import RankMemory
from moepass.runtime.homes.hybrid.device_staging import DeviceStagingBuffers
from moepass.runtime.homes.hybrid.hybrid_home import HybridPacker
from moepass.runtime.homes.hybrid.staged_pull import StagedPull
from moepass.runtime.homes.hybrid.stager import StagingBuffers
from moepass.runtime.homes.hybrid.staging_board import StagingBoard
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.system.shared_memory import SharedMemoryError, SharedSegment, in_pages
from moepass.runtime.transfer.sources import MemorySource, Source

# Flags of cudaHostRegister: for all devices of the process, and for memory that this process may only read.
_PORTABLE, _READ_ONLY = 1, 8


class DeviceHybridPacker(HybridPacker):
    """A hybrid packer with staging buffers in memory that `make_memory` makes; a stream of `device` fills them."""

    def __init__(
        self,
        group: PeerGroup,
        transport: StagedPull,
        staging_buffers: int,
        make_memory: Callable[[], RankMemory],
        device: torch.device,
    ) -> None:
        super().__init__(group, transport, staging_buffers)
        self.device_type = make_memory().device_type
        self._make_memory = make_memory
        self._device = device
        # The staging buffers of each rank, one after the other, and the object that keeps them mapped.
        self._memories: Sequence[torch.Tensor] = ()
        self._keeps: object = None

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """Return the shards of each bank, by its index, pinned for the GPU."""
        spread = super().spread(banks)
        for sources in spread.values():
            for source in sources:
                assert isinstance(source, MemorySource)
                self._pin(source.memory, is_own=not source.over_link)
        return spread

    def _pin(self, shard: torch.Tensor, *, is_own: bool) -> None:
        pin_shard(self.home, shard, is_own=is_own)

    def _reserve(self) -> None:
        size = max(self._buffer_bytes(rank) for rank in range(self.group.size))
        memory = self._make_memory()
        allocated = memory.allocate(self.staging_buffers * in_pages(size))
        self.group.check_alive()
        self._memories, self._keeps = memory.exchange() if self.group.size > 1 else ([allocated], None)
        super()._reserve()

    def _buffers_in_segment(self, rank: int) -> int:
        return 0

    def _buffers(self, rank: int, segment: SharedSegment, board: StagingBoard) -> StagingBuffers:
        step = self._memories[rank].numel() // self.staging_buffers
        memories = [
            self._memories[rank].narrow(0, number * step, self._buffer_bytes(rank))
            for number in range(self.staging_buffers)
        ]
        stream = torch.cuda.Stream(self._device) if rank == self.group.rank else None
        return DeviceStagingBuffers(board, memories, stream, self._keeps)


def pin_shard(owner: object, shard: torch.Tensor, *, is_own: bool) -> None:
    """Pin `shard`, mapped host memory, so that GPUs can read it; it stays pinned as long as `owner` lives.

    The shards of other ranks (not `is_own`) are pinned read-only. Raises SharedMemoryError if the CUDA runtime refuses.
    """
    if not shard.numel():
        return
    flags = _PORTABLE if is_own else _PORTABLE | _READ_ONLY
    result = int(torch.cuda.cudart().cudaHostRegister(shard.data_ptr(), shard.numel(), flags))
    if result:
        raise SharedMemoryError(
            f"{shard.numel()} bytes of host memory cannot be pinned (error {result} of the CUDA runtime); allow more "
            "locked memory (ulimit -l), or use home='peer' or home='host'",
            name="cudaHostRegister",
            value=result,
        )
    weakref.finalize(owner, _unpin, shard).atexit = False


def _unpin(shard: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(shard.data_ptr())
