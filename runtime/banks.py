"""Banks: the expert weights of one MoE layer, packed into one buffer at their home, and the store that keeps them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import NoReturn

import torch

from moepass.models.errors import InputError
from moepass.passes.ir import BankSpec, TensorSpec, dtype_name
from moepass.runtime.link import Link
from moepass.runtime.ring import Ring, make_ring

# Tensors in a bank start at multiples of this: what vector loads and grouped GEMM kernels want at most.
ALIGNMENT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Bank:
    """One layer's experts at rest: `shard` is a flat uint8 tensor that holds every tensor of `spec`."""

    spec: BankSpec
    shard: torch.Tensor

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The bank's tensors in `memory`, a copy of the shard."""
        return tuple(tensor.view(memory) for tensor in self.spec.tensors)


def pack_bank(index: int, name: str, tensors: Mapping[str, torch.Tensor], *, home: str, pin: bool) -> Bank:
    """Pack `tensors`, each [experts, ...], into one buffer in host memory; pinned where a CUDA device will read it."""
    specs: list[TensorSpec] = []
    offset = 0
    for tensor_name, tensor in tensors.items():
        specs.append(TensorSpec(tensor_name, tuple(tensor.shape), dtype_name(tensor.dtype), offset))
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    bank_device = next(iter(tensors.values())).device
    home_device = bank_device if bank_device.type == "meta" else torch.device("cpu")
    shard = torch.empty(offset, dtype=torch.uint8, device=home_device, pin_memory=pin)
    bank = Bank(BankSpec(index, name, home, offset, tuple(specs)), shard)
    for view, tensor in zip(bank.views(shard), tensors.values(), strict=True):
        view.copy_(tensor.detach())
    return bank


_store_numbers = itertools.count()
_stores: weakref.WeakValueDictionary[int, BankStore] = weakref.WeakValueDictionary()


class BankStore:
    """The banks of one offloaded model, and the ring that they stream through.

    The ring is made by the first compiled graph that needs it and shared by all graphs of the model, so that its memory
    is `slots` times the largest bank, however many shapes are compiled. Eager mode does not use it: there a bank is
    gathered into fresh memory, and only the last one is kept, because one layer reads its bank several times.
    """

    def __init__(self, device: torch.device, slots: int, link: Link) -> None:
        self.number = next(_store_numbers)
        self.device = device
        self.slots = slots
        self.link = link
        self.banks: list[Bank] = []
        self._ring: Ring | None = None
        self._lock = threading.Lock()
        self._eager: tuple[int, tuple[torch.Tensor, ...]] | None = None
        _stores[self.number] = self

    def __reduce__(self) -> NoReturn:
        # Reached by copy.deepcopy, copy.copy and pickle.
        raise InputError(
            "a model with offloaded experts cannot be copied or pickled: its banks and its ring belong to it alone; "
            "copy or save the model before offload_experts"
        )

    @property
    def home_bytes(self) -> int:
        """Bytes of all banks at rest."""
        return sum(bank.spec.nbytes for bank in self.banks)

    @property
    def ring_bytes(self) -> int:
        """Bytes that the ring takes on the compute device: slots times the largest bank."""
        return self.slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: those of the largest bank."""
        return max((bank.spec.nbytes for bank in self.banks), default=0)

    def ring(self, debug: bool = False) -> Ring:
        with self._lock:
            if self._ring is None:
                self._ring = make_ring(self.slots, self.slot_bytes, self.device, self.link)
            # Once asked for, poisoning stays on: the graphs of a model share the ring.
            self._ring.debug = self._ring.debug or debug
            return self._ring

    def gather_now(self, bank: int) -> tuple[torch.Tensor, ...]:
        """The complete bank on the compute device, in memory of its own: the synchronous gather of eager mode."""
        last = self._eager
        if last is not None and last[0] == bank:
            return last[1]
        self._eager = last = None  # before the copy, so that at most one bank is held
        memory = self.banks[bank].shard.to(self.device, copy=True)
        tensors = self.banks[bank].views(memory)
        self._eager = (bank, tensors)
        return tensors


def find_store(number: int) -> BankStore:
    """The store with that number. Raises KeyError where its model is gone."""
    return _stores[number]
