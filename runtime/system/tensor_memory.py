"""Identity of a tensor's memory, and samples of its bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

# The storage of a tensor and its offset in it. Unique only while a StorageWeakRef to that storage exists.
Memory = tuple[int, int]

# [Empirical] Bytes of each of the three pieces of a sample: 200 tensors are read in a quarter of a millisecond.
_PIECE_BYTES = 96


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the identity of the tensor's memory."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def sampled_bytes(tensor: torch.Tensor) -> bytes:
    """Return some bytes of a tensor on a CPU, from its first to its last: a few hundred, or all of a smaller one.

    Reads the memory directly, because torch's operators take several times as long for so few bytes.
    """
    nbytes, address = _extent_bytes(tensor), tensor.data_ptr()
    if nbytes <= 3 * _PIECE_BYTES:
        return ctypes.string_at(address, nbytes)
    last = nbytes - _PIECE_BYTES
    read = ctypes.string_at
    return read(address, _PIECE_BYTES) + read(address + last // 2, _PIECE_BYTES) + read(address + last, _PIECE_BYTES)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of the last, in memory."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def offset_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the beginning of a tensor's storage to its first element."""
    return int(tensor.storage_offset()) * tensor.itemsize


def as_extent(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first element of a tensor to its last, as a flat tensor of the same type."""
    elements = 0 if tensor.numel() == 0 else _extent_bytes(tensor) // tensor.itemsize
    return tensor.as_strided((elements,), (1,))


def tensor_in_storage(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a tensor in existing memory. Raises RuntimeError if it would not fit."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset_bytes // dtype.itemsize, tuple(shape), tuple(strides))
