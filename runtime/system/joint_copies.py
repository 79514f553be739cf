"""Uploads: many small tensors go to a device in one copy, and the host does not wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# Each tensor begins at a multiple of this number of bytes, so that kernels may read several numbers at once.
ALIGNMENT = 16

_Nest = TypeVar("_Nest")


def upload(nest: _Nest, device: torch.device) -> _Nest:
    """Return `nest`, named or other tuples, lists and dicts, with all of its tensors on `device`.

    The tensors must be on the CPU, and they share one allocation on the device. For a CPU, this returns `nest` itself.
    """
    if device.type == "cpu":
        return nest
    leaves, structure = tree_flatten(nest)
    tensors = [(index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    parts: list[torch.Tensor] = []
    starts: list[int] = []
    end = 0
    for _, tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        gap = -flat.numel() % ALIGNMENT
        parts += [flat, flat.new_zeros(gap)]
        starts.append(end)
        end += flat.numel() + gap
    if not tensors:
        return nest
    # torch keeps pinned memory until copies out of it are done.
    pinned = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    uploaded = torch.cat(parts, out=pinned).to(device, non_blocking=True)
    for (index, tensor), start in zip(tensors, starts, strict=True):
        leaves[index] = uploaded[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    result: _Nest = tree_unflatten(leaves, structure)
    return result


def as_graph_inputs(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return uploaded `tensors`, each in memory of its own: compiled graphs are guarded by offsets into memory."""
    return [tensor if tensor.device.type == "cpu" else tensor.clone() for tensor in tensors]
