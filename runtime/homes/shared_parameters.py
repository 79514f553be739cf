"""Move a model's parameters into the shard that holds their copy, so that their bytes are held once.

A parameter gets the shard as its storage. On a CPU that is mapped privately: what somebody writes to it later is seen
by this rank alone, as before, and other ranks go on reading what was agreed on. It stays the same object with the same
shape, strides and version, so no guard of compiled code notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.system.tensor_users import are_only_users


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
    if tensor.device.type != device_type or tensor.is_inference() or not tensor.is_contiguous():
        return False
    return are_only_users([tensor])
