"""Host memory that the CUDA runtime pins, so that GPUs read it while the host goes on."""

from __future__ import annotations

import mmap
import weakref

import torch

from moepass.runtime.system.huge_pages import use_huge_pages
from moepass.runtime.system.shared_memory import SharedMemoryError

# Flags of cudaHostRegister: for all devices of the process, and for memory that this process may only read.
_PORTABLE, _READ_ONLY = 1, 8


def pinned_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return flat uint8 memory of `nbytes`, which copies to `device` may read while they run.

    torch's own pinned memory takes the next power of two. Raises SharedMemoryError if the CUDA runtime refuses.
    """
    with torch.inference_mode(False):  # inference tensors could not be written outside that mode
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # The tensor keeps the mapping alive, so the mapping is unpinned when the last tensor of this memory is freed.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    use_huge_pages(memory.data_ptr(), nbytes)
    _pin(mapping, None, memory, device, _PORTABLE)
    return memory


def pin_shard(owner: object, shard: torch.Tensor, device: torch.device, *, is_own: bool) -> None:
    """Pin `shard`, mapped host memory, so that GPUs can read it; it stays pinned as long as `owner` lives.

    Copies from the shard to `device` end before it is unpinned. The shards of other ranks (not `is_own`) are pinned
    read-only. Raises SharedMemoryError if the CUDA runtime refuses.
    """
    _pin(owner, shard, shard, device, _PORTABLE if is_own else _PORTABLE | _READ_ONLY)


def _pin(owner: object, kept: object, memory: torch.Tensor, device: torch.device, flags: int) -> None:
    """Pin `memory` as long as `owner` lives, and keep `kept` alive until then."""
    if not memory.numel():
        return
    result = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
    if result:
        raise SharedMemoryError(
            f"{memory.numel()} bytes of host memory cannot be pinned (error {result} of the CUDA runtime); allow more "
            "locked memory (ulimit -l), or use another home: peer does not pin memory, and disk needs little of it",
            name="cudaHostRegister",
            value=result,
        )
    weakref.finalize(owner, _unpin, memory.data_ptr(), device, kept).atexit = False


def _unpin(address: int, device: torch.device, kept: object) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
