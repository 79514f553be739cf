"""Banks: the expert weights of one MoE layer, packed into one buffer at their home, and the store that owns them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from moepass.models.errors import InputError
from moepass.models.homes import home_named
from moepass.models.layouts.packed_floats import PackedFormula
from moepass.passes.ir.bank_format import BankFormat, ring_bytes
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import in_fp8, parameter_places, shard_layout
from moepass.runtime.banks.computed_parts import computed_part
from moepass.runtime.banks.stored_bank import packed, stored_bank
from moepass.runtime.kernels.decoders import check_matrices, decode_bank, naming_damage
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.system.pinned_memory import pinned_memory
from moepass.runtime.system.tensor_memory import MemoryTable, memories_of
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_ring

logger = logging.getLogger("moepass")

# Numbers sampled of each tensor that eager code reads. A write to the whole tensor always changes the sample.
_SAMPLED_NUMBERS = 64
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, eq=False)
class Bank:
    """One layer's experts at rest.

    Attributes:
        spec: names, shapes and layout of the complete bank; `spec.index` is unique in its store.
        shard: the bytes in this process, flat uint8. The home of the store knows the shards of other ranks. A bank in
            files has a shard of one byte that only identifies it in graphs.
    """

    spec: BankSpec
    shard: torch.Tensor

    @property
    def home_bytes(self) -> int:
        """Bytes at rest in this process, or in files."""
        return self.spec.format.home_bytes if home_named(self.spec.home).is_in_files else self.shard.numel()

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the bank's tensors as views of `memory`, the bytes of the complete bank."""
        return tuple(tensor.view(memory) for tensor in self.spec.tensors)


def describe_bank(
    index: int, name: str, tensors: Mapping[str, torch.Tensor], *, home: str, expert_bounds: tuple[int, ...] = ()
) -> BankSpec:
    """Return the spec of the bank that complete `tensors`, each [experts, ...], are packed into.

    Quantised tensors that are not read yet rest as the checkpoint stores them, if `bank_parts` can say how.
    """
    layout = packed(tensors)
    spec = BankSpec(index, name, home, BankFormat.plain(layout.nbytes), layout.tensors, expert_bounds)
    stored = stored_bank(tensors)
    if stored is None:
        return spec
    at_rest = packed(stored.tensors)
    format = BankFormat(at_rest.nbytes, at_rest.nbytes, layout.nbytes, stored.name)
    return dataclasses.replace(spec, format=format, stored=at_rest.tensors, parts=stored.parts)


def resting_tensors(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors that rest in the bank of `tensors`: those that the checkpoint stores, or `tensors`."""
    stored = stored_bank(tensors)
    return tensors if stored is None else stored.tensors


def pack_bank(
    index: int,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    home: str,
    device: torch.device = _CPU,
    pinned_for: torch.device | None = None,
) -> Bank:
    """Pack `tensors`, each [experts, ...], into one buffer: in memory of `device`, or pinned for a GPU."""
    spec = describe_bank(index, name, tensors, home=home)
    bank_device = next(iter(tensors.values())).device
    home_device = bank_device if bank_device.type == "meta" else device
    with torch.inference_mode(False):  # the shard needs a version counter, which shows writes in place
        if pinned_for is not None and home_device.type == "cpu":
            shard = pinned_memory(spec.format.home_bytes, pinned_for)
        else:
            shard = torch.empty(spec.format.home_bytes, dtype=torch.uint8, device=home_device)
        write_parts(spec, 0, list(resting_tensors(tensors).values()), shard)
    return Bank(spec, shard)


def write_parts(spec: BankSpec, rank: int, parts: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
    """Write `parts`, the parameters that make up the shard of `rank`, into `shard`, flat uint8."""
    for tensor, parameter in zip(parameter_places(spec, rank), parts, strict=False):
        tensor.view(shard).copy_(parameter.detach())
    layout = shard_layout(spec, rank)
    for recipe in spec.recipes:
        layout.tensors[recipe.position].view(shard).copy_(computed_part(recipe, parts))
    for part in spec.parts:
        if isinstance(part.formula, PackedFormula):
            with naming_damage(spec, part):
                check_matrices(part.formula, {role: layout.tensors[index].view(shard) for role, index in part.stored})


_store_numbers = itertools.count()
_stores: weakref.WeakValueDictionary[int, BankStore] = weakref.WeakValueDictionary()
# The table keeps no store alive.
_banks_by_input: MemoryTable[tuple[weakref.ref[BankStore], BankSpec]] = MemoryTable()
_banks_by_input_lock = threading.Lock()


class BankStore:
    """The banks of one home for one compute device, and the ring that they stream through.

    The first compiled graph that needs the ring creates it, and all graphs share it. Its memory is `ring_slots` times
    the largest bank, however many shapes are compiled. Eager mode does not use the ring: it gathers a bank into fresh
    memory and caches the last one, because one layer reads its bank several times.

    Attributes:
        slots: the requested number of slots; `ring_slots` may be smaller.
        number: the store's number in graphs, see `find_store`.
        placed: the planner's decisions when the banks were moved to their home; None if there was no plan.
        multiplies_in_fp8: graphs keep expert matrices in FP8 in their slots. Eager mode decodes them.
        warns_of_uncompiled_calls: whether the first call of the uncompiled model logs a warning.
    """

    def __init__(self, device: torch.device, slots: int, link: Link, home: Home) -> None:
        self.device, self.slots, self.link, self.home = device, slots, link, home
        self.number = next(_store_numbers)
        self.placed: PlacedModel | None = None
        self.multiplies_in_fp8 = False
        self.warns_of_uncompiled_calls = True
        self._banks: dict[int, Bank] = {}
        # None until a compiled graph needs a ring.
        self.current_ring: Ring | None = None
        self._ring_lock = threading.RLock()
        self._owner = OwnerProcess()
        # The last bank that eager mode gathered: its key, its tensors and a sample of them.
        self._eager: tuple[object, tuple[torch.Tensor, ...], torch.Tensor] | None = None
        # All tensors that eager code got and may still have, with their addresses and versions.
        self._handed_out: list[tuple[TensorWeakRef, tuple[int, int]]] = []
        self._was_written = False
        # The stream on which it was gathered. The allocator reuses its memory on that stream.
        self._eager_stream: torch.cuda.Stream | None = None
        self._has_warned_of_graph_breaks = False
        _stores[self.number] = self

    def __reduce__(self) -> NoReturn:
        refuse_copy()

    @property
    def banks(self) -> list[Bank]:
        """The banks, in the order in which they were added."""
        return list(self._banks.values())

    def bank(self, index: int) -> Bank:
        """Return the bank with that `spec.index`. Raises KeyError if the store has no such bank."""
        return self._banks[index]

    def add(self, bank: Bank, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Add `bank`, which graphs identify by `inputs`; by default by its shard."""
        inputs = [bank.shard] if inputs is None else inputs
        self._banks[bank.spec.index] = bank
        with _banks_by_input_lock:
            _banks_by_input.add(bank_key(bank.spec, inputs), inputs, (weakref.ref(self), bank.spec))

    def remove(self, bank: Bank) -> None:
        """Remove a bank that no graph will read again. The ring goes with the last bank."""
        del self._banks[bank.spec.index]
        if not self._banks:
            self.current_ring = None

    @property
    def home_bytes(self) -> int:
        """Bytes at rest in this process: complete banks, or its shards of them; for home `disk`, bytes in files."""
        return sum(bank.home_bytes for bank in self.banks)

    @property
    def ring_slots(self) -> int:
        """Slots of the ring: as many as requested, but no more than there are banks."""
        return min(self.slots, len(self._banks))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that can hold any bank completely."""
        specs = (in_fp8(bank.spec) if self.multiplies_in_fp8 else bank.spec for bank in self.banks)
        return max((spec.format.slot_bytes for spec in specs), default=0)

    @property
    def encoded_buffer_bytes(self) -> int:
        """Bytes of each encoded buffer of the ring, which holds any encoded bank; 0 if no bank is encoded."""
        return max((bank.spec.format.encoded_bytes for bank in self.banks), default=0)

    @property
    def ring_bytes(self) -> int:
        """Most bytes that the ring takes on the compute device: slots for complete banks, and encoded buffers."""
        return ring_bytes(self.ring_slots, self.slot_bytes, self.encoded_buffer_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes that banks take on the compute device now: the ring, and the cache of eager mode."""
        cached = sum(value.nbytes for value in self._eager[1]) if self._eager is not None else 0
        return cached + (0 if self.current_ring is None else self.current_ring.device_bytes)

    def ring(self, debug: bool = False, slot_bytes: int | None = None) -> Ring:
        """Return the ring for a compiled graph; the first call creates it. Clears the cache of eager mode.

        `debug` fills released slots with NaN; once on, it stays on, because graphs share the ring. `slot_bytes` is the
        size of the slots that the graph needs, by default the current size, or the largest bank's size in a new ring.
        """
        self.forget_gathered()
        self._owner.check()
        with self._ring_lock:
            if self.current_ring is None:
                size = self.slot_bytes if slot_bytes is None else slot_bytes
                self.current_ring = make_ring(self.ring_slots, size, self.device, self.link, home=self.home)
                self.current_ring.before_run = weakref.WeakMethod(self._before_compiled_run)
            ring = self.current_ring
            # Banks may have been added since it was created, and this graph may need larger slots.
            ring.reserve(self.ring_slots, slot_bytes or 0, self.encoded_buffer_bytes)
            ring.debug = ring.debug or debug
            return ring

    def read(self, bank: BankSpec, inputs: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Return a copy of bytes [start, stop) of the complete `bank`, laid out as in a slot, in new device memory.

        Waits for the copy. `inputs` are the tensors by which graphs identify the bank. `bank` is this store's spec, as
        `find_bank` returns it, not the spec in a graph's plan. Raises PeerError if a rank with one of the shards is
        gone.
        """
        self._owner.check()
        self.home.check()
        sources = self.home.sources(bank, inputs)
        self.home.copying(bank)
        read, format = self.home.transport.read, bank.format
        if not format.is_encoded:
            return read(bank, sources, start, stop, self.device)
        slot = torch.empty(format.slot_bytes, dtype=torch.uint8, device=self.device)
        decode_bank(bank, read(bank, sources, 0, format.link_bytes, self.device), slot)
        return slot if (start, stop) == (0, len(slot)) else slot[start:stop].clone()

    def read_tensor(self, bank: BankSpec, inputs: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        """Return a copy of tensor `index` of the complete `bank`, in new device memory. Raises the errors of `read`."""
        tensor = bank.tensors[index]
        memory = self.read(bank, inputs, tensor.offset_bytes, tensor.offset_bytes + tensor.nbytes)
        return memory.view(tensor.torch_dtype).view(tensor.shape)

    def gather_now(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a complete bank on the compute device: the synchronous gather of eager mode.

        Raises PeerError if a rank with a shard is gone, and InputError if tensors of earlier calls were written to.
        """
        self._owner.check()
        bank = self._banks[index]
        shard = bank.shard
        key = None if shard.is_inference() else (index, shard.data_ptr(), shard._version)
        last, stream = self._eager, _current_stream(self.device)
        is_other_stream = stream != self._eager_stream
        if stream is not None and self._eager_stream is not None and is_other_stream:
            stream.wait_stream(self._eager_stream)
        self._refuse_writes()
        if last is not None and last[0] == key is not None and not is_other_stream:
            return last[1]
        self._warn_of_uncompiled_code(bank.spec.name)
        self._eager = last = None  # freed before the copy, so that only one bank is in memory
        self._eager_stream = stream
        with torch.inference_mode(False):  # calls with gradients use the cached tensors too
            tensors = bank.views(self.read(bank.spec, [shard], 0, bank.spec.format.slot_bytes))
        self._eager = (key, tensors, _sample(tensors))
        self._handed_out += ((TensorWeakRef(tensor), _version(tensor)) for tensor in tensors)
        return tensors

    def forget_gathered(self) -> None:
        """Clear the cache of eager mode, so that the next `gather_now` copies.

        If its tensors were written to, the next `gather_now` or run of a compiled graph raises an error.
        """
        self._note_writes()
        self._eager, self._eager_stream = None, None

    def _note_writes(self) -> None:
        """Find writes to tensors that eager code got: by their versions and addresses, and in the cache by a sample."""
        living = [(tensor, version) for reference, version in self._handed_out if (tensor := reference()) is not None]
        is_written = any(_version(tensor) != version for tensor, version in living)
        if is_written or (self._eager is not None and not torch.equal(_sample(self._eager[1]), self._eager[2])):
            self._was_written, self._eager, living = True, None, []
        self._handed_out = [(TensorWeakRef(tensor), version) for tensor, version in living]

    def _refuse_writes(self) -> None:
        self._note_writes()
        if self._was_written:
            self._was_written = False
            raise InputError(
                "offloaded expert weights have been written to, perhaps by merging adapters; this changed a copy, and "
                "not the bank that the model reads: change or merge weights before offload_experts"
            )

    def _before_compiled_run(self) -> None:
        self.forget_gathered()  # the compiled graph has no use for its memory
        self._refuse_writes()

    def _warn_of_uncompiled_code(self, name: str) -> None:
        if not _is_called_by_compiled_model():
            if self.warns_of_uncompiled_calls:
                self.warns_of_uncompiled_calls = False
                logger.warning(
                    "%s: this call runs the uncompiled model, whose experts are copied layer by layer without overlap. "
                    "Compile it with torch.compile(model, backend='asyncep') and call the compiled model itself, "
                    "compiled(...): methods of it, such as compiled.generate(...), run the uncompiled model",
                    name,
                )
            return
        if self._has_warned_of_graph_breaks:
            return
        self._has_warned_of_graph_breaks = True
        warnings.warn(
            f"the experts of {name} are copied without overlap, because Dynamo runs this code of the compiled model "
            "uncompiled. Either it compiled the same code more often than "
            f"torch._dynamo.config.recompile_limit ({torch._dynamo.config.recompile_limit}) allows: raise that limit "
            "(TORCH_LOGS=recompiles lists the reasons). Or it cannot compile some of the code "
            "(TORCH_LOGS=graph_breaks)",
            stacklevel=2,
        )


def _is_called_by_compiled_model() -> bool:
    """Return True in code that Dynamo skipped, and False in a call of a model that was not compiled."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return numbers of which one changes if torch writes to `tensor` or replaces its memory."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return some bytes of each tensor. A write to a whole tensor, as by an adapter, changes them."""
    with torch.no_grad():
        if any(value.is_meta for value in tensors):
            return torch.empty(0)
        numbers = [value.flatten()[:: max(1, value.numel() // _SAMPLED_NUMBERS)] for value in tensors]
        # Bytes are compared, because NaN is not equal to itself.
        return torch.cat([sample.contiguous().view(torch.uint8) for sample in numbers])


def refuse_copy() -> NoReturn:
    """Raise InputError: copy.deepcopy, copy.copy or pickle was called on a model with offloaded experts."""
    raise InputError(
        "a model with offloaded experts cannot be copied or pickled: its banks and its ring belong to it alone; copy "
        "or save the model before offload_experts"
    )


def find_store(number: int) -> BankStore:
    """Return the store with that number. Raises KeyError if its model is gone."""
    return _stores[number]


def bank_key(bank: BankSpec, inputs: Sequence[torch.Tensor]) -> Hashable:
    """Return the key that identifies a bank by the memory of its inputs.

    Dynamo shares code between layers, so only a graph input distinguishes the banks of two layers. For
    inputs that are parameters, the key also contains their strides and the layout of the bank.
    """
    layout = (bank.tensors, bank.expert_bounds, bank.group, bank.recipes)
    views = (layout, (*map(_strides, inputs),)) if bank.group else None
    return views, memories_of(inputs)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions larger than 1. They distinguish a tensor from its transpose."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def find_bank(bank: BankSpec, inputs: Sequence[torch.Tensor]) -> tuple[BankStore, BankSpec] | None:
    """Return the store of the bank that a graph reads from `inputs`, and the store's own spec of it.

    `bank` is the spec in the graph's plan; the store's spec has another index and name where layers share code. Returns
    None if no store has the bank.
    """
    entry = _banks_by_input.find(bank_key(bank, inputs))
    if entry is None or (store := entry[0]()) is None:
        return None
    return store, entry[1]


# Stores without banks, of models whose experts all fit into the memory budget, by their expert weights.
_whole_model_stores: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_whole_model_store(experts: Iterable[torch.Tensor], store: BankStore | None) -> None:
    """Associate `experts` with `store`, which has no banks. None removes the association."""
    for weight in experts:
        _whole_model_stores.pop(weight, None)
        if store is not None:
            _whole_model_stores[weight] = store


def whole_model_store(tensors: Iterable[object]) -> BankStore | None:
    """Return the store associated with the first expert weight among `tensors`; None if there is no such weight.

    This store has the planner's decisions for a model whose experts were not moved.
    """
    stores = (_whole_model_stores.get(value) for value in tensors if isinstance(value, torch.Tensor))
    return next((store for store in stores if store is not None), None)
