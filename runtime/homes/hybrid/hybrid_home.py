"""Home `hybrid`: every rank stores 1/N of each bank in host memory, and copies some shards ahead into staging buffers.

    segment of a rank   its shards of all banks, one after the other                     (host memory)
                        its board: contents of its staging buffers, banks it needs next  (host memory)
                        its staging buffers, each as long as its largest shard           (memory of the compute device)

On a CPU all three are shared memory of the machine. On CUDA host memory is pinned, and the GPUs share staging buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank
from moepass.runtime.homes.device_home import SymmetricMemory
from moepass.runtime.homes.hybrid.staged_pull import StagedPull, StagedSource
from moepass.runtime.homes.hybrid.stager import DeviceStagingBuffers, Stager, StagingBuffers
from moepass.runtime.homes.hybrid.staging_board import MOST_BANKS, StagingBoard, board_bytes, check_machine
from moepass.runtime.homes.peer_home import PeerHome, PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.system.pinned_memory import pin_shard
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment, in_pages
from moepass.runtime.transfer.sources import MemorySource, Source, whole


class HybridHome(PeerHome):
    """Shards on all ranks of a group, read through staging buffers."""

    needs_host = True

    def __init__(self, group: PeerGroup, transport: StagedPull) -> None:
        super().__init__(group, transport)
        self._staged = transport

    def copying(self, bank: BankSpec) -> None:
        """Tell the stager that `bank` is being copied, so that it learns the order of banks."""
        if self._staged.stager is not None:
            self._staged.stager.learn(bank.index)


class HybridPacker(PeerPacker):
    """A packer with `staging_buffers` buffers on each rank.

    Raises InputError on processors where readers may miss that a buffer was refilled.
    """

    home_name = "hybrid"

    def __init__(self, group: PeerGroup, transport: StagedPull, staging_buffers: int) -> None:
        check_machine()
        super().__init__(group, transport)
        self.home = HybridHome(group, transport)
        self.staging_buffers = staging_buffers
        self._staged = transport
        self._staging_of: dict[int, StagingBuffers] = {}

    def agree_on(self, specs: Sequence[BankSpec], digests: Sequence[str]) -> None:
        """Check that all ranks have these banks. Raises InputError if a board cannot number them all."""
        if len(specs) > MOST_BANKS:
            text = f"the model has {len(specs)} banks; home='hybrid' supports at most {MOST_BANKS}: use home='peer'"
            raise InputError(text, name="the number of banks", value=len(specs), expected=MOST_BANKS)
        super().agree_on(specs, digests)

    def connect(self, banks: Sequence[Bank]) -> None:
        """Complete `banks`, and start to fill this rank's staging buffers."""
        spread = self.spread(banks)
        buffers = self._staging_of[self.group.rank]
        boards = [staging.board for rank, staging in self._staging_of.items() if rank != self.group.rank]
        shards = [whole(bank.shard) for bank in banks]
        self._staged.stager = Stager(buffers, boards, shards, self._staged.host_link)
        self.home.spread = spread

    def _reserve(self) -> None:
        rank = self.group.rank
        self._segment = self.group.make_segment(self._end_of_board(rank) + self._buffers_in_segment(rank) - PAGE_BYTES)
        # Mapped now, so that a lack of memory raises before the model changes.
        self._map_staging(rank, self._segment)

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        self._map_staging(rank, segment)
        return super()._open(rank, segment)

    def _map_staging(self, rank: int, segment: SharedSegment) -> None:
        start = self._offsets(rank)[-1]
        board = StagingBoard(segment.map(start, board_bytes(self.staging_buffers)), self.staging_buffers)
        self._staging_of[rank] = self._buffers(rank, segment, board)
        if rank == self.group.rank:
            self.home.staging_bytes = self.staging_buffers * self._buffer_bytes(rank)

    def _end_of_board(self, rank: int) -> int:
        return self._offsets(rank)[-1] + in_pages(board_bytes(self.staging_buffers))

    def _buffers_in_segment(self, rank: int) -> int:
        """Return the bytes behind the board in the segment of `rank`, for staging buffers."""
        return self.staging_buffers * in_pages(self._buffer_bytes(rank))

    def _buffers(self, rank: int, segment: SharedSegment, board: StagingBoard) -> StagingBuffers:
        start, nbytes = self._end_of_board(rank), self._buffer_bytes(rank)
        memories = [segment.map(start + number * in_pages(nbytes), nbytes) for number in range(self.staging_buffers)]
        return StagingBuffers(board, memories)

    def _buffer_bytes(self, rank: int) -> int:
        return max((shard_layout(spec, rank).nbytes for spec in self._specs), default=0)

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        is_other = rank != self.group.rank
        return StagedSource(shard, shard_pieces(spec, rank), is_other, spec.index, self._staging_of[rank])


class DeviceHybridPacker(HybridPacker):
    """A hybrid packer whose staging buffers `make_memory` allocates and a stream of `device` fills."""

    def __init__(
        self,
        group: PeerGroup,
        transport: StagedPull,
        staging_buffers: int,
        make_memory: Callable[[], SymmetricMemory],
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
                pin_shard(self.home, source.memory, self._device, is_own=not source.over_link)
        return spread

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
        starts = [number * step for number in range(self.staging_buffers)]
        memories = [self._memories[rank].narrow(0, start, self._buffer_bytes(rank)) for start in starts]
        stream = torch.cuda.Stream(self._device) if rank == self.group.rank else None
        return DeviceStagingBuffers(board, memories, stream, self._keeps)
