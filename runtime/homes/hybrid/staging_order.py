"""The choice of the contents of a rank's staging buffers, and of the next slice to copy; without memory or threads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Wants:
    """The banks that a rank will copy, the next one first, and whether it is in a run."""

    banks: tuple[int, ...]
    is_running: bool


def choose_banks(wants: Sequence[Wants], buffers: int) -> tuple[int, ...]:
    """Return the banks that `buffers` buffers should hold, the most urgent first. This rank's `wants` come first."""
    chosen: dict[int, None] = {}
    for is_running in (True, False):
        of_ranks = [want.banks for want in wants if want.is_running == is_running]
        for turn in itertools.zip_longest(*of_ranks):
            chosen |= dict.fromkeys(bank for bank in turn if bank is not None)
    return tuple(chosen)[:buffers]


@dataclasses.dataclass(frozen=True)
class StagingState:
    """The contents of a buffer: the first `filled_slices` slices of a rank's shard of `bank`; empty if `bank` is None.

    `generation` counts how often the buffer was assigned to a bank. While it is unchanged, no byte is overwritten.
    """

    bank: int | None = None
    generation: int = 0
    filled_slices: int = 0


@dataclasses.dataclass(frozen=True)
class Fill:
    """The next slice to copy: slice `slice_number` of this rank's shard of `bank`, into buffer number `buffer`."""

    buffer: int
    bank: int
    slice_number: int


class StagingPlan:
    """The contents of a rank's buffers, and the order in which slices go there.

    `slices` has, for each bank, the number of slices of this rank's shard.
    """

    def __init__(self, buffers: int, slices: Sequence[int]) -> None:
        self.states = [StagingState() for _ in range(buffers)]
        self._slices = tuple(slices)
        self._chosen: tuple[int, ...] = ()
        # Buffer numbers, in the order in which they were assigned to their banks.
        self._by_age = list(range(buffers))

    def choose(self, chosen: Sequence[int]) -> list[int]:
        """Assign buffers to the banks `chosen`, the most urgent first; no more banks than buffers.

        Returns the buffers that were assigned to another bank. Their bytes may be overwritten from now on.
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
        """Return the next slice of the most urgent incomplete bank, or None if all banks are complete."""
        buffer_of = {state.bank: buffer for buffer, state in enumerate(self.states)}
        for bank in self._chosen:
            state = self.states[buffer_of[bank]]
            if state.filled_slices < self._slices[bank]:
                return Fill(buffer_of[bank], bank, state.filled_slices)
        return None

    def filled(self, buffer: int) -> None:
        """Record that the slice that `next_fill` returned for `buffer` was copied."""
        state = self.states[buffer]
        self.states[buffer] = dataclasses.replace(state, filled_slices=state.filled_slices + 1)
