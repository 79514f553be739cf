"""The kernel of `moepass::complete_experts`: the experts of all ranks, gathered where a model asks for them.

It runs in eager mode, under other backends, and wherever the compiler left the operator in a graph; the gather is
synchronous. The banks are those that compiled graphs adopt: the first use of a layer, in whichever way, brings its
ranks together, once. From then on each copies what it lacks whenever it wants, and no rank waits for another.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from moepass.models.errors import InputError
from moepass.passes.blocks.lower_complete_experts import COMPLETE_EXPERTS, complete_bank
from moepass.runtime.banks.banks import find_bank
from moepass.runtime.homes.adopted_banks import adopted_banks
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S

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
        self._copies: list[torch.Tensor] | None = None
        _layers[number] = self

    def complete(self, parts: Sequence[torch.Tensor], stay: bool = True) -> list[torch.Tensor]:
        """All experts of each tensor of which `parts` are this rank's, in fresh memory.

        `stay` says that `parts` are the same memory in every call; then a change of them is noticed. Otherwise those of
        the first call count. Raises PeerError where ranks are missing, gone, or bring other tensors; InputError where
        `parts` are not what they were.
        """
        with self._lock:
            given = parts if stay else self._copied(parts)
        spec = complete_bank(self.name, given, self.bounds, self.group_name)
        match = find_bank(spec, given)
        if match is None:
            group = self._group()
            if group is None:
                raise InputError(f"the process group of {self.name} was destroyed; load the model anew", name=self.name)
            adopted_banks(group, given[0].device).adopt(group, [spec], [given], timeout_s=self.timeout_s)
            match = find_bank(spec, given)
            assert match is not None, "it was adopted right now"
        store, stored_spec = match
        return [store.read_tensor(stored_spec, given, place) for place in range(len(given))]

    def _copied(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """`parts` of the first call, in memory that stays."""
        if self._copies is None:
            with torch.inference_mode(False):
                self._copies = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
        if _shapes(parts) != _shapes(self._copies):
            raise InputError(
                f"{self.name} are {_shapes(parts)}, but were {_shapes(self._copies)} in their first use, which is what "
                "other ranks have; load, convert and place the model before its first run",
                name=self.name,
                value=_shapes(parts),
                expected=_shapes(self._copies),
            )
        return self._copies


def _shapes(parts: Sequence[torch.Tensor]) -> list[tuple[list[int], torch.dtype, torch.device]]:
    return [(list(part.shape), part.dtype, part.device) for part in parts]


def _complete_experts(
    layer: torch.Tensor, parts: Sequence[torch.Tensor], expert_bounds: Sequence[int], group_name: str, stay: bool
) -> list[torch.Tensor]:
    found = _layers.get(int(layer))
    if found is None:
        raise InputError(
            f"the model of experts number {int(layer)} is gone; a compiled graph of it cannot run any more",
            value=int(layer),
        )
    return found.complete(parts, stay)


_library = torch.library.Library("moepass", "IMPL")
_library.impl("complete_experts", _complete_experts, "CompositeExplicitAutograd")

__all__ = ["COMPLETE_EXPERTS", "CompleteExperts"]
