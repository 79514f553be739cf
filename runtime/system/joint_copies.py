"""Joint copies: many small tensors go to a device, or come from it, in one copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# Each tensor begins at a multiple of this number of bytes, so that kernels may read several numbers at once.
ALIGNMENT = 16

_Nest = TypeVar("_Nest")


def upload(nest: _Nest, device: torch.device) -> _Nest:
    """Return `nest`, of tuples, lists and dicts, with its tensors on `device`, without a wait of the host.

    The tensors must be on the CPU, and they share one allocation on the device. For a CPU, this returns `nest` itself.
    """
    if device.type == "cpu":
        return nest
    leaves, structure = tree_flatten(nest)
    tensors = _TensorBytes(leaves)
    if not tensors.parts:
        return nest
    # torch keeps pinned memory until copies out of it are done.
    pinned = torch.empty(tensors.nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    uploaded = torch.cat(tensors.parts, out=pinned).to(device, non_blocking=True)
    result: _Nest = tree_unflatten(tensors.replaced_by(uploaded), structure)
    return result


def download(nest: _Nest) -> _Nest:
    """Return `nest`, of tuples, lists and dicts, with its tensors on the CPU. The host waits for their values.

    The tensors must be on one device. If that is a CPU, this returns `nest` itself.
    """
    leaves, structure = tree_flatten(nest)
    if all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return nest
    tensors = _TensorBytes(leaves)
    result: _Nest = tree_unflatten(tensors.replaced_by(torch.cat(tensors.parts).to("cpu")), structure)
    return result


def as_graph_inputs(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return uploaded `tensors`, each in separate memory: compiled graphs are guarded by offsets into memory."""
    return [tensor if tensor.device.type == "cpu" else tensor.clone() for tensor in tensors]


class _TensorBytes:
    """The tensors among `leaves`, as the parts of one tensor of bytes."""

    def __init__(self, leaves: list[Any]) -> None:
        self._leaves = leaves
        self.places: list[tuple[int, int]] = []  # the index of each tensor among the leaves, and its first byte
        self.parts: list[torch.Tensor] = []
        self.nbytes = 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                # An empty array of numpy has a stride of 0, which torch cannot view as bytes.
                flat = leaf.reshape(-1).view(torch.uint8) if leaf.numel() else leaf.new_empty(0, dtype=torch.uint8)
                gap = -flat.numel() % ALIGNMENT
                self.places.append((index, self.nbytes))
                self.parts += [flat, flat.new_zeros(gap)]
                self.nbytes += flat.numel() + gap

    def replaced_by(self, joined: torch.Tensor) -> list[Any]:
        """Return the leaves with views of `joined`, flat uint8, as their tensors."""
        leaves = [*self._leaves]
        for index, start in self.places:
            tensor = leaves[index]
            leaves[index] = joined[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return leaves
