"""The move of parameters into the shard that contains a copy of them, so that their bytes are in memory once.

A parameter gets the shard as its storage. On a CPU the shard is mapped privately: a later write to the parameter is
visible to this rank alone, as before, and other ranks still read the bytes that the ranks agreed on. The parameter
stays the same object with the same shape, strides and version, so no guard of compiled code fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.system.tensor_memory import are_only_users


def share_parts(
    packer: PeerPacker, index: int, parts: Sequence[torch.Tensor], when_freed: Callable[[], None]
) -> list[bool]:
    """Move `parts`, which were packed as bank `index`, into its shard.

    No other thread may read `parts` during the call.

    Args:
        packer: the packer of the bank.
        index: the bank.
        parts: the parameters.
        when_freed: called once no parameter uses the shard any more; in any thread.

    Returns:
        For each parameter, whether it was moved.

    Raises:
        SharedMemoryError: the shard cannot be mapped.
    """
    # The parameters after these are not in the shard; only recipes read them.
    count = len(packer.parameters(index))
    movable = [number < count and is_movable(tensor, packer.device_type) for number, tensor in enumerate(parts)]
    positions = [position for position, is_free in enumerate(movable) if is_free]
    if positions:
        with torch.inference_mode(False):  # the new tensors need a version
            shared = packer.tensors_in_shard(index, positions, when_freed)
        for position, tensor in zip(positions, shared, strict=True):
            parts[position].data = tensor.view(parts[position].shape)
    return movable


def is_movable(tensor: torch.Tensor, device_type: str = "cpu") -> bool:
    """Return whether only `tensor` can reach its memory, and a shard on a `device_type` device can replace it."""
    if tensor.device.type != device_type or tensor.is_inference() or not tensor.is_contiguous():
        return False
    return are_only_users([tensor])
