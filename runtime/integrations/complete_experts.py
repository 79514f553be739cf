"""The kernel of `moepass::complete_experts`: all experts of a layer, gathered where a model asks for them.

It runs in eager mode, under other backends, and wherever the compiler left the operator in a graph. The gather is
synchronous. The banks are those that compiled graphs adopt: the ranks rendezvous once, at the first use of a layer.
From then on each rank copies missing experts on its own and waits for no other rank.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from moepass.models.errors import InputError
from moepass.passes.blocks.lower_complete_experts import complete_bank
from moepass.runtime.banks.banks import find_bank
from moepass.runtime.homes.adopted_banks import adopted_banks

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, CompleteExperts] = weakref.WeakValueDictionary()


class CompleteExperts:
    """The experts of one layer. Rank r of `group` has the experts [bounds[r], bounds[r + 1]).

    `handle` is the `layer` argument of the operator. `name` must be the same on all ranks.
    """

    def __init__(self, name: str, group: ProcessGroup, bounds: Sequence[int]) -> None:
        self.name = name
        self.group_name = group.group_name
        self.bounds = list(bounds)
        number = next(_numbers)
        self.handle = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._group = weakref.ref(group)
        self._lock = threading.Lock()
        self._copies: list[torch.Tensor] | None = None
        _layers[number] = self

    def complete(self, parts: Sequence[torch.Tensor], stay: bool = True) -> list[torch.Tensor]:
        """Return the tensors with the experts of all ranks, in new memory; `parts` are this rank's shards of them.

        With `stay`, `parts` have the same memory in every call, and changes are noticed. Otherwise the values of
        the first call are used. Raises PeerError if a rank is missing or gone, or has other tensors, and InputError if
        `parts` have other shapes than before.
        """
        with self._lock:
            shards = parts if stay else self._copied(parts)
        spec = complete_bank(self.name, shards, self.bounds, self.group_name)
        match = find_bank(spec, shards)
        if match is None:
            group = self._group()
            if group is None:
                raise InputError(
                    f"the process group of {self.name} was destroyed; load the model again", name=self.name
                )
            adopted_banks(group, shards[0].device).adopt(group, [spec], [shards])
            match = find_bank(spec, shards)
            assert match is not None, "it was adopted right now"
        store, stored_spec = match
        return [store.read_tensor(stored_spec, shards, index) for index in range(len(shards))]

    def _copied(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the copy of `parts` that the first call makes. Raises InputError if shapes have changed since."""
        if self._copies is None:
            with torch.inference_mode(False):
                self._copies = [shard.detach().clone(memory_format=torch.contiguous_format) for shard in parts]
        if _shapes(parts) != _shapes(self._copies):
            text = (
                f"the shapes of {self.name} are {_shapes(parts)}, but were {_shapes(self._copies)} at first use, which "
                "other ranks still expect; load, convert and place the model before its first run"
            )
            raise InputError(text, name=self.name, value=_shapes(parts), expected=_shapes(self._copies))
        return self._copies


def _shapes(parts: Sequence[torch.Tensor]) -> list[tuple[list[int], torch.dtype, torch.device]]:
    return [(list(shard.shape), shard.dtype, shard.device) for shard in parts]


def _complete_experts(
    layer: torch.Tensor, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str, stay: bool
) -> list[torch.Tensor]:
    experts = _layers.get(int(layer))
    if experts is None:
        text = f"the model of experts number {int(layer)} was deleted; its compiled graphs can no longer run"
        raise InputError(text, value=int(layer))
    return experts.complete(parts, stay)


_library = torch.library.Library("moepass", "IMPL")
_library.impl("complete_experts", _complete_experts, "CompositeExplicitAutograd")
