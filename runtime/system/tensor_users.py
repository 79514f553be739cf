"""Who can reach a tensor's memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import torch


def are_only_users(tensors: Sequence[torch.Tensor]) -> bool:
    """True where nothing but `tensors` themselves can reach their memory; False also where that is not known.

    They may lie in one memory.
    """
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() for tensor in tensors):
        return False
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return False
    # What `share_memory_()` moved is resizable as before, and other processes have it. On CUDA it says nothing.
    if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in tensors):
        return False
    if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return False
    # Handles of torch's own count too, in a way of its version: compare with a tensor that nobody else has.
    alone = torch.empty(1, device=tensors[0].device)
    if any(_holders(tensor) != _holders(alone) for tensor in tensors):
        return False
    of_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_storage[tensor.untyped_storage()._cdata].append(tensor)
    expected = _users_of_memory(alone)
    return all(
        # Not resizable: numpy or a file has that memory too.
        together[0].untyped_storage().resizable()
        and _users_of_memory(together[0]) == (expected[0] + len(together) - 1, expected[1])
        for together in of_storage.values()
    )


def _holders(tensor: torch.Tensor) -> int:
    """How many hold the tensor outside Python, Python itself included."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _users_of_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold its storage, and how many the storage's object in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
