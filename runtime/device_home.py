"""Home `peer` on GPUs: every rank keeps 1/N of each bank in its GPU's memory, from which the other GPUs copy.

torch's symmetric memory maps the memory of all ranks into the addresses of each GPU, so a copy from another rank is an
ordinary copy on the ring's own stream: no rank takes part in what another one copies. By CUDA's rules for memory that
was mapped from another process, it stays for as long as anybody has it mapped, as shared memory of the host does.

Unmeasured: tests run all of this but `SymmetricMemory` itself, which has not been on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from moepass.passes.ir import BankSpec
from moepass.passes.shards import shard_layout, shard_pieces
from moepass.runtime.peer_home import PeerHome, PeerPacker
from moepass.runtime.peers import PeerGroup
from moepass.runtime.shared_memory import PAGE_BYTES, SharedMemoryError, SharedSegment
from moepass.runtime.sources import MemorySource, Source
from moepass.runtime.transports import Transport


class RankMemory(Protocol):
    """Memory of equal size on all ranks, each of which can read that of the others."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's, flat uint8."""

    def exchange(self) -> Sequence[torch.Tensor]:
        """That of all ranks by rank, filled. All ranks come here. Raises SharedMemoryError where it cannot be read."""


class SymmetricMemory:
    """`RankMemory` on the CUDA device of each rank of `group`, which must all be on one machine, and different."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._own: torch.Tensor | None = None
        # Tensors of other ranks are valid for as long as this is there.
        self._handle: Any = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._own

    def exchange(self) -> list[torch.Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory

        assert self._own is not None, "allocate comes first"
        torch.cuda.synchronize(self._device)
        try:
            self._handle = symmetric_memory.rendezvous(self._own, self._group)
            return [
                self._handle.get_remote_tensor(rank, self._own.shape, self._own.dtype)
                for rank in range(self._group.size())
            ]
        except RuntimeError as error:
            raise SharedMemoryError(
                f"the GPUs of the ranks cannot read each other's memory: {error}; each rank needs a GPU of its own, on "
                "one machine, with peer access to the others; without that use home='host'"
            ) from error


class DeviceHome(PeerHome):
    """Shards in `memory`, which is there for as long as this is."""

    def __init__(self, group: PeerGroup, transport: Transport, memory: RankMemory) -> None:
        super().__init__(group, transport)
        self._memory = memory


class DevicePacker(PeerPacker):
    """As `PeerPacker`, with shards in `memory`. The segment of shared memory is there for goodbyes alone."""

    def __init__(self, group: PeerGroup, transport: Transport, memory: RankMemory) -> None:
        super().__init__(group, transport)
        self.home = DeviceHome(group, transport, memory)
        self._of_ranks = memory
        self._own: torch.Tensor | None = None
        self._all: Sequence[torch.Tensor] | None = None

    def _reserve(self) -> None:
        self._segment = self.group.make_segment(0)
        self._own = self._of_ranks.allocate(max(self._end(rank) for rank in range(self.group.size)))

    def _memory(self, index: int) -> torch.Tensor:
        assert self._own is not None, "agree comes first"
        return self._shards(self.group.rank, self._own)[index]

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        if self._all is None:
            self._all = self._of_ranks.exchange()
        return self._shards(rank, self._all[rank])

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        return MemorySource(shard, shard_pieces(spec, rank), over_link=rank != self.group.rank)

    def _shards(self, rank: int, memory: torch.Tensor) -> list[torch.Tensor]:
        layouts = [shard_layout(spec, rank) for spec in self._specs]
        return [
            memory.narrow(0, place - PAGE_BYTES, at.nbytes)
            for place, at in zip(self._places(rank), layouts, strict=False)
        ]

    def _end(self, rank: int) -> int:
        """Bytes of all shards of `rank`."""
        return self._places(rank)[-1] - PAGE_BYTES
