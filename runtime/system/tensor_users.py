"""Search for other references to a tensor's memory."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import torch


def are_only_users(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing but `tensors` references their memory, which they may share; False if that is unknown."""
    if not all(type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() for tensor in tensors):
        return False
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return False
    # Memory of `share_memory_()` is still resizable, but other processes have it. On CUDA is_shared is always true.
    if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in tensors):
        return False
    if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return False
    # Torch's own references count too, differently in each version: compare with a tensor that has no other users.
    alone = torch.empty(1, device=tensors[0].device)
    if any(_holders(tensor) != _holders(alone) for tensor in tensors):
        return False
    of_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        of_storage[tensor.untyped_storage()._cdata].append(tensor)
    expected = _users_of_memory(alone)
    return all(
        # Memory that is not resizable belongs to numpy or a file.
        together[0].untyped_storage().resizable()
        and _users_of_memory(together[0]) == (expected[0] + len(together) - 1, expected[1])
        for together in of_storage.values()
    )


def _holders(tensor: torch.Tensor) -> int:
    """Return the number of references to the tensor outside Python; Python itself counts as one."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _users_of_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of references to its storage, and to the storage's Python object."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
