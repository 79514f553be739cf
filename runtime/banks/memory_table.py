"""Tables keyed by the memory of tensors, and the key that identifies a bank.

A bank is identified by the memory of the graph inputs that it is read from. Dynamo shares code between layers, so only
a graph input distinguishes the banks of two layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.system.tensor_memory import Memory, memory_of

_Value = TypeVar("_Value")


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


def bank_key(bank: BankSpec, inputs: Sequence[torch.Tensor]) -> Hashable:
    """Return the key that identifies a bank by the memory of its inputs.

    For inputs that are parameters, the key also contains their strides and the layout of the bank.
    """
    layout = (bank.tensors, bank.expert_bounds, bank.group, bank.recipes)
    views = (layout, (*map(_strides, inputs),)) if bank.group else None
    return views, memories_of(inputs)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions larger than 1. They distinguish a tensor from its transpose."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    """Return the memory of each tensor, in order; usable as a key."""
    return tuple(memory_of(tensor) for tensor in tensors)
