"""Where a tensor lies: what tells one parameter from another, whatever object stands for it."""

from __future__ import annotations

import torch

# The storage that a tensor lies in, and where in it. Unique only while a StorageWeakRef to that storage exists.
Memory = tuple[int, int]


def memory_of(tensor: torch.Tensor) -> Memory:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
