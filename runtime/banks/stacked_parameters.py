"""Keep the parameters of single experts in one memory [experts, ..], and show them as one tensor.

A graph whose loop over experts became grouped GEMMs reads one tensor; the model has a parameter for each expert. Where
they come first, the parameters move into one memory: each gets its part of it as its storage. It stays the same object
with the same shape, strides and version, so no guard of compiled code notices, and a write to it is seen by all who
read it, as before. Whatever happens to the model, a run reads what its parameters hold: a view of that memory as long
as they lie there side by side, in whichever graph they come.

New parameters (`load_state_dict(assign=True)`, a move to another device) move together when they come first. Parameters
stay where they are, and are copied in each run, where something else reaches their memory, as tied weights, views of
one buffer and memory of files do, or where they lie together with others for another loop.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from moepass.runtime.banks.identity import MemoryTable
from moepass.runtime.system.tensor_memory import offset_bytes, tensor_in_storage
from moepass.runtime.system.tensor_users import are_only_users

logger = logging.getLogger("moepass")

# One for all graphs: two of them may read the same parameters.
_moving = threading.Lock()
# By the storage: who moved parameters there.
_movers: MemoryTable[weakref.ref[StackedParameters]] = MemoryTable()


class StackedParameters(torch.nn.Module):
    """The parameters, one for each expert, that one place of a graph reads together; `names` are theirs.

    `note` is told why they are copied in each run, once, where they are.
    """

    def __init__(self, names: Sequence[str], note: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._note = note
        self._names = list(names)
        self._is_told = False
        # Those that this object moved last.
        self._moved: list[weakref.ref[torch.Tensor]] = []

    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """`parts` as one tensor [experts, ..], contiguous as each of them is. All have one type, shape and device.

        No other thread may read them where they come first.
        """
        found = _side_by_side(parts)
        if found is not None:
            return found
        with _moving:
            found = _side_by_side(parts)
            if found is None and _may_move(parts) and not self._lie_with_others(parts):
                _move_together(parts)
                self._moved = [weakref.ref(part) for part in parts]
                found = _side_by_side(parts)
                _movers.add(_storage_key(parts[0]), parts[:1], weakref.ref(self))
        if found is None:
            self._tell(parts)
            return torch.stack([part.detach() for part in parts])
        return found

    def _lie_with_others(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether another place reads some of `parts` in one memory, in another order or with others."""
        movers = {found() for part in parts if (found := _movers.find(_storage_key(part))) is not None}
        return any(mover is not None and mover is not self and mover._are_together() for mover in movers)

    def _are_together(self) -> bool:
        parts = [reference() for reference in self._moved]
        living = [part for part in parts if part is not None]
        return len(living) == len(parts) and _side_by_side(living) is not None

    def _tell(self, parts: Sequence[torch.Tensor]) -> None:
        if self._is_told:
            return
        self._is_told = True
        reason = (
            f"{self._names[0]} and {len(parts) - 1} others are copied together in each run "
            f"({sum(part.nbytes for part in parts)} bytes): something else reaches their memory, as tied weights, "
            "views of one buffer, a file or another loop over experts do; give each memory of its own before the first "
            "run: parameter.data = parameter.data.clone()"
        )
        logger.warning("%s", reason)
        if self._note is not None:
            self._note(reason)


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """`parts` as one tensor, if they lie one behind the other in one storage."""
    first = parts[0]
    start, step = first.data_ptr(), first.nbytes
    if any(part.data_ptr() != start + place * step for place, part in enumerate(parts)):
        return None
    storage = first.untyped_storage()
    # Storages may be neighbours by chance.
    if storage.data_ptr() + storage.nbytes() < start + step * len(parts):
        return None
    strides = (first.numel(), *first.stride())
    return tensor_in_storage(storage, first.dtype, offset_bytes(first), (len(parts), *first.shape), strides)


def _may_move(parts: Sequence[torch.Tensor]) -> bool:
    is_recording = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_recording and len({part.is_inference() for part in parts}) == 1 and are_only_users(parts)


def _move_together(parts: Sequence[torch.Tensor]) -> None:
    first = parts[0]
    # Dynamo's guards tell inference tensors from others.
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        memory = torch.empty((len(parts), *first.shape), dtype=first.dtype, device=first.device)
        if first.is_cuda:
            torch.cuda.synchronize(first.device)  # what other streams read is freed
        for place, part in enumerate(parts):
            memory[place].copy_(part)
            part.data = memory[place]  # so that no more than one expert is there twice
