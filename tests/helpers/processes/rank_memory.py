"""Memory for shards on a device, which is shared memory of the host here, because there is no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moepass.runtime.homes.device_home import SymmetricMemory
from moepass.runtime.system.shared_memory import create_segment, open_segment

# Memory of other ranks that must no longer be read.
_poisoned: list[torch.Tensor] = []


class _Handle:
    """Keeps the memory of other ranks mapped; once it is gone, reads return NaN."""

    def __init__(self) -> None:
        self.mapped: list[torch.Tensor] = []
        weakref.finalize(self, _poison, self.mapped).atexit = False


def _poison(mapped: list[torch.Tensor]) -> None:
    for memory in mapped:
        memory.fill_(0xFF)
    _poisoned.extend(mapped)


@dataclasses.dataclass
class Seen:
    """Records about `Segments` that outlive them.

    Attributes:
        begin: Address of this rank's memory.
        end: Address behind it.
        handle: The object that keeps the memory of other ranks mapped.
    """

    begin: int = 0
    end: int = 0
    handle: weakref.ref[_Handle] | None = None


class Segments(SymmetricMemory):
    """`SymmetricMemory` that every process of this machine can open. Bytes arrive late, as on a GPU."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.seen = Seen()

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.own = create_segment(nbytes, "test")
        self.late = torch.zeros(nbytes, dtype=torch.uint8)
        self.seen.begin, self.seen.end = self.late.data_ptr(), self.late.data_ptr() + nbytes
        return self.late

    def exchange(self) -> tuple[list[torch.Tensor], object]:
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, self.own.address())
        opened = [open_segment(address) for address in addresses]
        dist.barrier()  # as in torch: a rank may free its memory afterwards
        assert len({segment.nbytes for segment in opened}) == 1, "symmetric memory has one size on all ranks"
        handle, rank = _Handle(), dist.get_rank()
        self.seen.handle = weakref.ref(handle)
        # Private mappings, so that the poison is visible only in this process.
        mapped = [torch.frombuffer(segment.map_privately(0, segment.nbytes), dtype=torch.uint8) for segment in opened]
        handle.mapped.extend(mapped)
        return [self.late if of == rank else _unowned(memory) for of, memory in enumerate(mapped)], handle

    def finish_writing(self) -> None:
        self.own.map(0, self.own.nbytes).copy_(self.late)

    def with_own_storage(self, memory: torch.Tensor, when_freed: Callable[[], None]) -> torch.Tensor:
        exported = _exported(memory)
        exported.memory = memory
        weakref.finalize(exported, when_freed).atexit = False
        return torch.frombuffer(exported, dtype=torch.uint8)


def _unowned(memory: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(_exported(memory), dtype=torch.uint8)


def _exported(memory: torch.Tensor) -> Any:
    return (ctypes.c_char * memory.numel()).from_address(memory.data_ptr())
