"""Memory for shards on a device, which is shared memory of the host here, as there is no GPU."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moepass.runtime.shared_memory import create_segment, open_segment


class Segments:
    """`RankMemory` that every process of this machine can have. Bytes arrive late, as those of a GPU do."""

    device_type = "cpu"

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.own = create_segment(nbytes, "test")
        self.late = torch.zeros(nbytes, dtype=torch.uint8)
        return self.late

    def exchange(self) -> list[torch.Tensor]:
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, self.own.address())
        opened = [open_segment(address) for address in addresses]
        assert len({segment.nbytes for segment in opened}) == 1, "symmetric memory has one size on all ranks"
        rank = dist.get_rank()
        return [self.late if of == rank else segment.map(0, segment.nbytes) for of, segment in enumerate(opened)]

    def finish_writing(self) -> None:
        self.own.map(0, self.own.nbytes).copy_(self.late)

    def with_own_storage(self, memory: torch.Tensor, when_freed: Callable[[], None]) -> torch.Tensor:
        exported: Any = (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
        exported.memory = memory
        weakref.finalize(exported, when_freed).atexit = False
        return torch.frombuffer(exported, dtype=torch.uint8)
