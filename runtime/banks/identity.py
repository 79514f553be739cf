"""One identity for a bank, however it came: offloaded, adopted from parameters, or asked for complete.

A bank is known by the memory of the graph inputs that it is read from. Its handle says who keeps it: all banks of one
keeper stream through its ring.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.kernels.decoders import codec_of
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.system.tensor_memory import Memory, memory_of
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_ring

_Value = TypeVar("_Value")


class MemoryTable(Generic[_Value]):
    """A dictionary keyed by tensor memory. An entry expires when any of its storages is freed.

    Weak references to the storages keep the keys unique: while an entry exists, no other storage gets its address.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[_Value, tuple[StorageWeakRef, ...]]] = {}

    def find(self, key: Hashable) -> _Value | None:
        """The tensors behind `key` must be alive; otherwise the result may be stale."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def add(self, key: Hashable, tensors: Iterable[torch.Tensor], value: _Value) -> None:
        """Add an entry and remove expired ones."""
        living = {known: entry for known, entry in self._entries.items() if not _is_gone(entry[1])}
        storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        self._entries = {**living, key: (value, storages)}

    def pop(self, key: Hashable) -> _Value | None:
        found = self._entries.pop(key, None)
        return None if found is None else found[0]

    def living(self) -> dict[Hashable, _Value]:
        """Entries whose storages are all alive."""
        return {key: value for key, (value, storages) in list(self._entries.items()) if not _is_gone(storages)}


def _is_gone(storages: Iterable[StorageWeakRef]) -> bool:
    return any(storage.expired() for storage in storages)


class BankKeeper:
    """Owns the banks of one home for one device, and the ring they share."""

    home: Home
    link: Link
    # Requested number of slots; `ring_slots` may be smaller.
    slots: int

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring: Ring | None = None
        self._ring_lock = threading.RLock()
        self._owner = OwnerProcess()

    def specs(self) -> Sequence[BankSpec]:
        """The banks that are kept."""
        raise NotImplementedError

    @property
    def ring_slots(self) -> int:
        """Slots of the ring: as many as were asked for, but no more than there are banks."""
        return min(self.slots, len(self.specs()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot for any bank as a whole: those of the largest one."""
        return max((spec.format.slot_bytes for spec in self.specs()), default=0)

    @property
    def encoded_buffer_bytes(self) -> int:
        """Bytes of the ring's encoded buffer: the largest encoded bank on its way; 0 where none is encoded."""
        return max((spec.format.link_bytes for spec in self.specs() if spec.format.is_encoded), default=0)

    def ring(self, debug: bool = False, slot_bytes: int | None = None) -> Ring:
        """The ring, for a compiled graph that needs slots of `slot_bytes`; the first call makes it.

        None: slots as they are, or, in a new ring, for any bank as a whole.
        """
        self._owner.check()
        with self._ring_lock:
            if self._ring is None:
                size = self.slot_bytes if slot_bytes is None else slot_bytes
                self._ring = make_ring(self.ring_slots, size, self.device, self.link, home=self.home)
            # Banks may have come since it was made, and graphs that need larger slots.
            self._ring.reserve(self.ring_slots, slot_bytes or 0, self.encoded_buffer_bytes)
            # Once asked for, poisoning stays on: graphs share the ring.
            self._ring.debug = self._ring.debug or debug
            return self._ring

    def read(self, bank: BankSpec, inputs: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) of the complete `bank` as in a slot, in fresh memory on the device; synchronous.

        Raises PeerError where a rank that holds a part of it is gone.
        """
        self._owner.check()
        self.home.check()
        sources = self.home.sources(bank, inputs)
        self.home.copying(bank)
        read, found = self.home.transport.read, bank.format
        if not found.is_encoded:
            return read(bank, sources, start, stop, self.device)
        slot = torch.empty(found.slot_bytes, dtype=torch.uint8, device=self.device)
        codec_of(found.decoder).decode(read(bank, sources, 0, found.link_bytes, self.device), slot)
        return slot[start:stop]

    def read_tensor(self, bank: BankSpec, inputs: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Tensor `index` of the complete `bank`, in fresh memory on the device. Raises as `read`."""
        tensor = bank.tensors[index]
        memory = self.read(bank, inputs, tensor.offset_bytes, tensor.offset_bytes + tensor.nbytes)
        return memory.view(tensor.torch_dtype).view(tensor.shape)


@dataclasses.dataclass(frozen=True)
class BankHandle:
    """A bank and its owner. `spec` has the owner's name and index for it."""

    keeper: BankKeeper
    spec: BankSpec


_handles: MemoryTable[tuple[weakref.ref[BankKeeper], BankSpec]] = MemoryTable()
_handles_lock = threading.Lock()


def bank_key(bank: BankSpec, inputs: Sequence[torch.Tensor]) -> Hashable:
    """Identity of a bank: the memory of its inputs. For parameters also their strides and the bank they are part of."""
    made_of = (bank.tensors, bank.expert_bounds, bank.group, bank.recipes)
    whole = (made_of, (*map(_steps, inputs),)) if bank.group else None
    return whole, memories_of(inputs)


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of dimensions larger than 1. They distinguish a tensor from its transpose."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def memories_of(tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
    return tuple(memory_of(tensor) for tensor in tensors)


def register_bank(keeper: BankKeeper, bank: BankSpec, inputs: Sequence[torch.Tensor]) -> None:
    """Let graphs that take `inputs` read this bank of `keeper`. The table does not keep `keeper` alive."""
    with _handles_lock:
        _handles.add(bank_key(bank, inputs), inputs, (weakref.ref(keeper), bank))


def find_bank(bank: BankSpec, inputs: Sequence[torch.Tensor]) -> BankHandle | None:
    """The bank that a graph reads from `inputs`; `bank` is the graph's own spec of it. None if it has no keeper."""
    found = _handles.find(bank_key(bank, inputs))
    keeper = None if found is None else found[0]()
    return None if found is None or keeper is None else BankHandle(keeper, found[1])


__all__ = [
    "BankHandle", "BankKeeper", "MemoryTable", "bank_key", "find_bank", "memories_of", "register_bank",
]  # fmt: skip
