"""Banks: the expert weights of one MoE layer, packed into one buffer at their home, and the store that keeps them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from moepass.models.errors import InputError
from moepass.models.homes import home_named
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import ALIGNMENT_BYTES, pack_layout, parameter_places, shard_layout
from moepass.runtime.banks.computed_parts import computed_part
from moepass.runtime.banks.identity import BankKeeper, register_bank
from moepass.runtime.kernels.decoders import codec_of
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring
from moepass.runtime.transfer.streams import current_stream

logger = logging.getLogger("moepass")

# Numbers sampled of each tensor that eager code reads: enough to see that all of it was changed.
_SAMPLED_NUMBERS = 64


@dataclasses.dataclass(frozen=True)
class Bank:
    """One layer's experts at rest: `shard` is this process's part, flat uint8, and what a graph takes as its input.

    Where the shard is not all of the bank, the home of the store knows the rest. A bank in files has a shard of one
    byte, which stands for it in graphs.
    """

    spec: BankSpec
    shard: torch.Tensor

    @property
    def home_bytes(self) -> int:
        """Bytes at rest."""
        return self.spec.format.home_bytes if home_named(self.spec.home).is_in_files else self.shard.numel()

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The bank's tensors in `memory`, which holds the complete bank."""
        return tuple(tensor.view(memory) for tensor in self.spec.tensors)


def describe_bank(
    index: int, name: str, tensors: Mapping[str, torch.Tensor], *, home: str, expert_bounds: tuple[int, ...] = ()
) -> BankSpec:
    """The bank that complete `tensors`, each [experts, ...], are packed into."""
    layout = pack_layout((key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items())
    return BankSpec(index, name, home, BankFormat.plain(layout.nbytes), layout.tensors, expert_bounds)


def pack_bank(
    index: int, name: str, tensors: Mapping[str, torch.Tensor], *, home: str, pin: bool, decoder: str = ""
) -> Bank:
    """Pack `tensors`, each [experts, ...], into one buffer in host memory; pinned where a CUDA device will read it.

    With `decoder` it rests in the format of that name. Raises InputError where there is none, or it cannot hold them.
    """
    spec = describe_bank(index, name, tensors, home=home)
    bank_device = next(iter(tensors.values())).device
    home_device = bank_device if bank_device.type == "meta" else torch.device("cpu")
    with torch.inference_mode(False):  # inference tensors have no version counter, which tells of changes in place
        shard = torch.empty(spec.format.slot_bytes, dtype=torch.uint8, device=home_device, pin_memory=pin)
        write_parts(spec, 0, list(tensors.values()), shard)
        if decoder:
            shard, spec = _encoded(spec, shard, decoder, pin)
    return Bank(spec, shard)


def _encoded(spec: BankSpec, plain: torch.Tensor, decoder: str, pin: bool) -> tuple[torch.Tensor, BankSpec]:
    codec = codec_of(decoder)
    shard = codec.encode(plain)
    found = BankFormat(shard.numel(), codec.link_bytes(shard.numel()), plain.numel(), decoder)
    return (shard.pin_memory() if pin else shard), dataclasses.replace(spec, format=found)


def write_parts(spec: BankSpec, rank: int, parts: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
    """Write `parts`, the parameters that the shard of `rank` is made of, into `shard`, flat uint8."""
    for place, part in zip(parameter_places(spec, rank), parts, strict=False):
        place.view(shard).copy_(part.detach())
    layout = shard_layout(spec, rank)
    for recipe in spec.recipes:
        layout.tensors[recipe.position].view(shard).copy_(computed_part(recipe, parts))


_store_numbers = itertools.count()
_stores: weakref.WeakValueDictionary[int, BankStore] = weakref.WeakValueDictionary()


class BankStore(BankKeeper):
    """The banks of one offloaded model, and the ring that they stream through.

    The ring is made by the first compiled graph that needs it and shared by all graphs of the model, so that its memory
    is `slots` times the largest bank, however many shapes are compiled; no more slots than there are banks. Eager mode
    does not use it: there a bank is gathered into fresh memory, and only the last one is kept, because one layer reads
    its bank several times.

    `placed` is what was decided for the model when its banks were brought here.
    """

    def __init__(self, device: torch.device, slots: int, link: Link, home: Home) -> None:
        super().__init__(device)
        self.number = next(_store_numbers)
        self.slots = slots
        self.link = link
        self.home = home
        self.banks: list[Bank] = []
        self.placed: PlacedModel | None = None
        self._eager: tuple[object, tuple[torch.Tensor, ...], torch.Tensor] | None = None
        # On which it was gathered, and is read: its memory is free for that stream once it is let go.
        self._eager_stream: torch.cuda.Stream | None = None
        # Set to False where uncompiled calls are meant; the first is told otherwise.
        self.tells_of_uncompiled_calls = True
        self._has_warned_of_graph_breaks = False
        _stores[self.number] = self

    def __reduce__(self) -> NoReturn:
        # Reached by copy.deepcopy, copy.copy and pickle.
        raise InputError(
            "a model with offloaded experts cannot be copied or pickled: its banks and its ring belong to it alone; "
            "copy or save the model before offload_experts"
        )

    def add(self, bank: Bank) -> None:
        """Take `bank`, whose index is the number of banks so far; compiled graphs then know it by its shard."""
        self.banks.append(bank)
        register_bank(self, bank.spec, [bank.shard])

    def specs(self) -> Sequence[BankSpec]:
        return [bank.spec for bank in self.banks]

    @property
    def home_bytes(self) -> int:
        """Bytes that rest in this process: all banks, or its shards of them; for home `disk`, bytes in files."""
        return sum(bank.home_bytes for bank in self.banks)

    @property
    def ring_bytes(self) -> int:
        """Bytes that the ring takes on the compute device at most: its slots for whole banks, and an encoded buffer."""
        return self.ring_slots * self.slot_bytes + self.encoded_buffer_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes that banks occupy on the compute device now: the ring, once it is made, and what eager mode holds."""
        held = sum(value.nbytes for value in self._eager[1]) if self._eager is not None else 0
        return held + (0 if self._ring is None else self._ring.device_bytes)

    def ring(self, debug: bool = False, slot_bytes: int | None = None) -> Ring:
        """The ring of the model, for a compiled graph. What eager mode held until now is let go."""
        self.forget_gathered()
        return super().ring(debug, slot_bytes)

    def gather_now(self, bank: int) -> tuple[torch.Tensor, ...]:
        """The complete bank on the compute device, in memory of its own: the synchronous gather of eager mode.

        Raises PeerError where a rank that holds a part of it is gone, and InputError where somebody wrote into what
        the last call gave.
        """
        self._owner.check()
        shard = self.banks[bank].shard
        key = None if shard.is_inference() else (bank, shard.data_ptr(), shard._version)
        last, stream = self._eager, current_stream(self.device)
        has_other_stream = stream != self._eager_stream
        if stream is not None and self._eager_stream is not None and has_other_stream:
            stream.wait_stream(self._eager_stream)
        if last is not None and not torch.equal(_sample(last[1]), last[2]):
            self._eager = None
            raise InputError(
                "expert weights that were offloaded have been written to (merged adapters, perhaps), which changes a "
                "copy of them and not the bank that the model reads; change or merge weights before offload_experts"
            )
        if last is not None and last[0] == key is not None and not has_other_stream:
            return last[1]
        self._warn_of_uncompiled_code(bank)
        self._eager = last = None  # before the copy, so that at most one bank is held
        self._eager_stream = stream
        with torch.inference_mode(False):  # what is held serves calls with gradients too
            spec = self.banks[bank].spec
            tensors = self.banks[bank].views(self.read(spec, [shard], 0, spec.format.slot_bytes))
        self._eager = (key, tensors, _sample(tensors))
        return tensors

    def forget_gathered(self) -> None:
        """Let the next `gather_now` be a gather, whichever bank was the last."""
        self._eager, self._eager_stream = None, None

    def _warn_of_uncompiled_code(self, bank: int) -> None:
        if not _is_called_by_compiled_model():
            if self.tells_of_uncompiled_calls:
                self.tells_of_uncompiled_calls = False
                logger.warning(
                    "%s: this call runs the uncompiled model, whose experts are copied layer by layer without overlap. "
                    "Compile it with torch.compile(model, backend='asyncep') and call the compiled model itself, "
                    "compiled(...): methods of it, such as compiled.generate(...), run the uncompiled model",
                    self.banks[bank].spec.name,
                )
            return
        if self._has_warned_of_graph_breaks:
            return
        self._has_warned_of_graph_breaks = True
        warnings.warn(
            f"the experts of {self.banks[bank].spec.name} are copied without overlap, because Dynamo runs this part of "
            "the compiled model uncompiled. Either it compiled the same code more often than "
            f"torch._dynamo.config.recompile_limit ({torch._dynamo.config.recompile_limit}) allows: raise that limit "
            "(TORCH_LOGS=recompiles names the reasons). Or there is a part that it cannot compile "
            "(TORCH_LOGS=graph_breaks)",
            stacklevel=2,
        )


def _is_called_by_compiled_model() -> bool:
    """True in code that Dynamo looked at and left as it is; false in a call of the model that was not compiled."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some bytes of each tensor, by which a write to all of it shows, as that of an adapter or of other weights."""
    with torch.no_grad():
        if any(value.is_meta for value in tensors):
            return torch.empty(0)  # there is nothing to write to
        numbers = [value.flatten()[:: max(1, value.numel() // _SAMPLED_NUMBERS)] for value in tensors]
        # As bytes: NaN is not equal to itself.
        return torch.cat([some.contiguous().view(torch.uint8) for some in numbers])


def find_store(number: int) -> BankStore:
    """The store with that number. Raises KeyError where its model is gone."""
    return _stores[number]


__all__ = [
    "ALIGNMENT_BYTES", "Bank", "BankStore", "describe_bank", "find_store", "pack_bank", "write_parts",
]  # fmt: skip
