"""Move a model's parameters into the shard that holds their copy, so that their bytes are held once.

A parameter gets the shard as its storage. On a CPU that is mapped privately: what somebody writes to it later is seen
by this rank alone, as before, and other ranks go on reading what was agreed on. It stays the same object with the same
shape, strides and version, so no guard of compiled code notices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from moepass.runtime.homes.peer_home import PeerPacker


def share_parts(
    packer: PeerPacker, index: int, parts: Sequence[torch.Tensor], when_freed: Callable[[], None]
) -> list[bool]:
    """Move `parts`, which were packed as bank `index`, into its shard; gives which of them could be moved.

    `when_freed` is called once nothing lies there any more, in any thread. No other thread may read `parts` meanwhile.
    Raises SharedMemoryError where the shard cannot be mapped.
    """
    # What lies behind these in `parts` was read by recipes alone.
    lie_in_shard = len(packer.parameters(index))
    movable = [place < lie_in_shard and is_movable(part, packer.device_type) for place, part in enumerate(parts)]
    positions = [position for position, is_free in enumerate(movable) if is_free]
    if positions:
        with torch.inference_mode(False):  # inference tensors have no version
            shared = packer.tensors_in_shard(index, positions, when_freed)
        for position, tensor in zip(positions, shared, strict=True):
            parts[position].data = tensor.view(parts[position].shape)
    return movable


def is_movable(tensor: torch.Tensor, device_type: str = "cpu") -> bool:
    """True where nothing but `tensor` itself can reach its memory, and its bytes lie there as they do in a shard that
    is on a device of `device_type`.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
        return False
    if tensor.device.type != device_type:
        return False
    if tensor.is_inference() or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    # Not resizable: numpy, another process or a file has that memory too.
    if not tensor.untyped_storage().resizable():
        return False
    users = _users(tensor)
    return users is not None and users == _users(torch.empty(1, device=tensor.device))


def _users(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """How many hold the tensor outside Python, its storage, and the storage's object in Python; None where unknown.

    Handles of its own count too, in a way of torch's version: compare with a tensor that nobody else has.
    """
    if not hasattr(tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
