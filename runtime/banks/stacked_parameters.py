"""Parameters of single experts stored side by side, so that they can be read as one tensor [experts, ..].

A graph whose loop over experts became grouped GEMMs reads one tensor; the model has a parameter for each expert. On the
first read the parameters move into one allocation: the storage of each becomes a slice of it. A parameter stays the
same object with the same shape, strides and version, so no guard of compiled code fails, and every reader sees a write
to it, as before. A run always reads their current values, through a view as long as they lie side by side.

New parameters (`load_state_dict(assign=True)`, a move to another device) move together on their first read. Parameters
are copied in each run instead if something else reaches their memory (tied weights, views of one buffer, memory of
files), or if another loop needs them in another order.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from moepass.runtime.system.tensor_memory import MemoryTable, are_only_users, offset_bytes, tensor_in_storage

logger = logging.getLogger("moepass")

# One lock for all graphs, because two graphs may read the same parameters.
_moving = threading.Lock()
# The object that moved parameters into a storage, by that storage.
_movers: MemoryTable[weakref.ref[StackedParameters]] = MemoryTable()


class StackedParameters(torch.nn.Module):
    """The parameters, one for each expert, that one operation of a graph reads as one tensor.

    `names` are the names of the parameters. If they must be copied in each run, the first of these runs calls `note`
    with the reason.
    """

    def __init__(self, names: Sequence[str], note: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._note = note
        self._names = list(names)
        self._has_noted = False
        # The parameters that this object moved last.
        self._moved: list[weakref.ref[torch.Tensor]] = []

    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `parts` as one tensor [experts, ..]. All parts have one dtype, shape and device, and are contiguous.

        No other thread may read `parts` during their first read.
        """
        stacked = _side_by_side(parts)
        if stacked is not None:
            return stacked
        with _moving:
            stacked = _side_by_side(parts)
            if stacked is None and _may_move(parts) and not self._lie_with_others(parts):
                _move_together(parts)
                self._moved = [weakref.ref(tensor) for tensor in parts]
                stacked = _side_by_side(parts)
                _movers.add(_storage_key(parts[0]), parts[:1], weakref.ref(self))
        if stacked is None:
            self._note_copies(parts)
            return torch.stack([tensor.detach() for tensor in parts])
        return stacked

    def _lie_with_others(self, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether another operation reads some of `parts` from one allocation, in another order or number."""
        references = (_movers.find(_storage_key(tensor)) for tensor in parts)
        movers = {reference() for reference in references if reference is not None}
        return any(mover is not None and mover is not self and mover._are_together() for mover in movers)

    def _are_together(self) -> bool:
        living = [tensor for reference in self._moved if (tensor := reference()) is not None]
        return len(living) == len(self._moved) and _side_by_side(living) is not None

    def _note_copies(self, parts: Sequence[torch.Tensor]) -> None:
        if self._has_noted:
            return
        self._has_noted = True
        reason = (
            f"{self._names[0]} and {len(parts) - 1} others are copied together in each run "
            f"({sum(tensor.nbytes for tensor in parts)} bytes): something else reaches their memory, such as tied "
            "weights, views of one buffer, a file or another loop over experts; give each parameter separate memory "
            "before the first run: parameter.data = parameter.data.clone()"
        )
        logger.warning("%s", reason)
        if self._note is not None:
            self._note(reason)


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return `parts` as one tensor if they follow each other in one storage, else None."""
    first = parts[0]
    start, step = first.data_ptr(), first.nbytes
    if any(tensor.data_ptr() != start + index * step for index, tensor in enumerate(parts)):
        return None
    storage = first.untyped_storage()
    # Two storages may be neighbours by chance.
    if storage.data_ptr() + storage.nbytes() < start + step * len(parts):
        return None
    strides = (first.numel(), *first.stride())
    return tensor_in_storage(storage, first.dtype, offset_bytes(first), (len(parts), *first.shape), strides)


def _may_move(parts: Sequence[torch.Tensor]) -> bool:
    is_recording = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_recording and len({tensor.is_inference() for tensor in parts}) == 1 and are_only_users(parts)


def _move_together(parts: Sequence[torch.Tensor]) -> None:
    first = parts[0]
    # Dynamo guards on whether a tensor is an inference tensor.
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        memory = torch.empty((len(parts), *first.shape), dtype=first.dtype, device=first.device)
        if first.is_cuda:
            torch.cuda.synchronize(first.device)  # other streams may still read the memory that is freed below
        for index, tensor in enumerate(parts):
            memory[index].copy_(tensor)
            tensor.data = memory[index]  # frees the old memory, so that only one expert is in memory twice
