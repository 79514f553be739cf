"""The kernel of `moepass::complete_experts`: the experts of all ranks, gathered where a model asks for them.

It runs in eager mode, under other backends, and wherever the compiler left the operator in a graph; the gather is
synchronous. The first use of a layer brings its ranks together, once: each copies its part into shared memory. From
then on each copies what it lacks whenever it wants, and no rank waits for another.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from moepass.models.errors import InputError
from moepass.passes.blocks.lower_complete_experts import COMPLETE_EXPERTS
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import pack_layout
from moepass.runtime.banks.banks import Bank
from moepass.runtime.banks.mutation_guard import MutationGuard
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.transfer.sources import read_range

_MEETING = "every rank of the group must run the model once, and with the same layers"

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, CompleteExperts] = weakref.WeakValueDictionary()


class CompleteExperts:
    """The experts of one layer, of which rank r of `group` has [bounds[r], bounds[r + 1]).

    `handle` is what the operator gets as its `layer`. `name` must be the same on all ranks.
    """

    def __init__(
        self, name: str, group: ProcessGroup, bounds: Sequence[int], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.name = name
        self.group_name = group.group_name
        self.bounds = list(bounds)
        self.timeout_s = timeout_s
        number = next(_numbers)
        self.handle = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._group = weakref.ref(group)
        self._lock = threading.Lock()
        self._bank: Bank | None = None
        self._packer: PeerPacker | None = None
        self._shapes: object = None
        self._watch: MutationGuard | None = None
        self._memory: list[torch.UntypedStorage] = []
        _layers[number] = self

    def complete(self, parts: Sequence[torch.Tensor], stay: bool = True) -> list[torch.Tensor]:
        """All experts of each tensor of which `parts` are this rank's, in fresh memory.

        `stay` says that `parts` are the same memory in every call; then a change of them is noticed. Raises PeerError
        where ranks are missing, gone, or bring other tensors; InputError where `parts` are not those of the first call.
        """
        with self._lock:
            if self._bank is None:
                self._meet(parts, stay)
            assert self._packer is not None
            assert self._bank is not None
            self._check_unchanged(parts)
        bank = self._bank.spec
        self._packer.home.check()
        sources = self._packer.home.sources(bank, [self._bank.shard])
        complete = []
        for tensor in bank.tensors:
            memory = read_range(sources, tensor.offset_bytes, tensor.offset_bytes + tensor.nbytes, parts[0].device)
            complete.append(memory.view(tensor.torch_dtype).view(tensor.shape))
        return complete

    def _meet(self, parts: Sequence[torch.Tensor], stay: bool) -> None:
        layout = pack_layout(
            (f"tensor_{place}", (self.bounds[-1], *part.shape[1:]), part.dtype) for place, part in enumerate(parts)
        )
        spec = BankSpec(0, self.name, "peer", layout.nbytes, layout.tensors, tuple(self.bounds), self.group_name)
        packer = PeerPacker(PeerGroup.of(self._group(), self.timeout_s, _MEETING))
        # Ranks hold different experts, so their weights have no digest in common.
        packer.agree_on([spec], [""])
        bank = packer.pack_part(0, parts)
        packer.connect([bank])
        self._packer, self._shapes, self._bank = packer, _shapes(parts), bank
        if stay:
            self._watch = MutationGuard(parts, [place.view(bank.shard) for place in packer.layout(0).tensors])
            # They are known by their addresses, so compiled code must not move them into shards of its own.
            self._memory = [part.untyped_storage() for part in parts]

    def _check_unchanged(self, parts: Sequence[torch.Tensor]) -> None:
        if _shapes(parts) != self._shapes or (self._watch is not None and not self._watch.are_unchanged(parts)):
            raise InputError(
                f"{self.name} were changed after their first use, but other ranks have the old ones; load, convert "
                "and place the model before its first run"
            )


def _shapes(parts: Sequence[torch.Tensor]) -> object:
    return [(tuple(part.shape), part.dtype, part.device) for part in parts]


def _complete_experts(
    layer: torch.Tensor, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str, stay: bool
) -> list[torch.Tensor]:
    found = _layers.get(int(layer))
    if found is None:
        raise InputError(
            f"the model of experts number {int(layer)} is gone; a compiled graph of it cannot run any more"
        )
    return found.complete(parts, stay)


_library = torch.library.Library("moepass", "IMPL")
_library.impl("complete_experts", _complete_experts, "CompositeExplicitAutograd")

__all__ = ["COMPLETE_EXPERTS", "CompleteExperts"]
