"""Decides what the staging buffers of a rank hold, and what is copied into them next. No memory and no thread.

All ranks read the buffers of a rank. The bank that each rank reads next comes first, and ranks in a run come before
idle ones. So a rank that runs ahead of another one keeps the banks that the other one still needs, as long as there
are buffers enough for both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Wants:
    """The banks that a rank will copy, the next one first; `is_running` while it is in a run."""

    banks: tuple[int, ...]
    is_running: bool


def choose_banks(wants: Sequence[Wants], buffers: int) -> tuple[int, ...]:
    """The banks that `buffers` buffers should hold, the most urgent one first. `wants` begins with this rank's own."""
    chosen: dict[int, None] = {}
    for is_running in (True, False):
        of_ranks = [want.banks for want in wants if want.is_running == is_running]
        for turn in itertools.zip_longest(*of_ranks):
            chosen |= dict.fromkeys(bank for bank in turn if bank is not None)
    return tuple(chosen)[:buffers]


@dataclasses.dataclass(frozen=True)
class StagingState:
    """Contents of a buffer: the first `filled_slices` of a rank's shard of `bank`, or nothing.

    `generation` counts how often the buffer was given to a bank. While it stays the same, no byte is overwritten.
    """

    bank: int | None = None
    generation: int = 0
    filled_slices: int = 0


@dataclasses.dataclass(frozen=True)
class Fill:
    """The next thing to copy: slice `slice_number` of this rank's shard of `bank`, into buffer number `buffer`."""

    buffer: int
    bank: int
    slice_number: int


class StagingPlan:
    """Contents of a rank's buffers, and which slice goes into which buffer next."""

    def __init__(self, buffers: int, slices: Sequence[int]) -> None:
        """`slices` says for each bank of how many slices this rank's shard consists."""
        self.states = [StagingState() for _ in range(buffers)]
        self._slices = tuple(slices)
        self._chosen: tuple[int, ...] = ()
        # Buffer numbers; the one that has held its bank for longest comes first.
        self._by_age = list(range(buffers))

    def choose(self, chosen: Sequence[int]) -> list[int]:
        """The buffers should hold the banks `chosen`, the most urgent one first; no more banks than buffers.

        Returns the buffers that were given to another bank. Their bytes may be overwritten from now on.
        """
        self._chosen = tuple(chosen)
        held = {state.bank for state in self.states}
        idle = [buffer for buffer in self._by_age if self.states[buffer].bank not in self._chosen]
        taken = []
        for bank, buffer in zip([bank for bank in self._chosen if bank not in held], idle, strict=False):
            self.states[buffer] = StagingState(bank, self.states[buffer].generation + 1)
            self._by_age.remove(buffer)
            self._by_age.append(buffer)
            taken.append(buffer)
        return taken

    def next_fill(self) -> Fill | None:
        """The next slice to copy: of the most urgent bank that is not complete; None if all are."""
        buffer_of = {state.bank: buffer for buffer, state in enumerate(self.states)}
        for bank in self._chosen:
            state = self.states[buffer_of[bank]]
            if state.filled_slices < self._slices[bank]:
                return Fill(buffer_of[bank], bank, state.filled_slices)
        return None

    def filled(self, buffer: int) -> None:
        """The slice that `next_fill` named for `buffer` was copied."""
        state = self.states[buffer]
        self.states[buffer] = dataclasses.replace(state, filled_slices=state.filled_slices + 1)
