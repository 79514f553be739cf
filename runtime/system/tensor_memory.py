"""Identity of tensors' memory, tables keyed by it, samples of its bytes, and a search for other references to it."""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The storage of a tensor and its offset in it. Unique only while a StorageWeakRef to that storage exists.
Memory = tuple[int, int]

_Value = TypeVar("_Value")

# [Empirical] Bytes of each of the three pieces of a sample: 200 tensors are read in a quarter of a millisecond.
_PIECE_BYTES = 96


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the identity of the tensor's memory."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """Return the memory of each tensor, in order; usable as a key."""
    return tuple(memory_of(tensor) for tensor in tensors)


class MemoryTable(Generic[_Value]):
    """A dictionary keyed by tensor memory. An entry expires when any of its storages is freed.

    Weak references to the storages keep the keys unique: while an entry exists, no other storage gets its address.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[_Value, tuple[StorageWeakRef, ...]]] = {}

    def find(self, key: Hashable) -> _Value | None:
        """Return the value of `key`, or None. The tensors behind `key` must be alive; otherwise it may be stale."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def add(self, key: Hashable, tensors: Iterable[torch.Tensor], value: _Value) -> None:
        """Add an entry that lives as long as the storages of `tensors`, and remove expired entries."""
        living = {key: entry for key, entry in self._entries.items() if not _is_expired(entry[1])}
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        self._entries = {**living, key: (value, storages)}

    def pop(self, key: Hashable) -> _Value | None:
        """Remove the entry of `key` and return its value; return None if there is no entry."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[0]

    def living(self) -> dict[Hashable, _Value]:
        """Return the entries whose storages are all alive."""
        return {key: value for key, (value, storages) in list(self._entries.items()) if not _is_expired(storages)}


def _is_expired(storages: Iterable[StorageWeakRef]) -> bool:
    return any(storage.expired() for storage in storages)


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
