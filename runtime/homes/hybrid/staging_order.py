"""What the stages of a rank should hold, and what is copied into them next: decisions alone, no memory and no thread.

A rank's stages are for all ranks: the nearest need of each comes first, of ranks in a run before those that rest. So a
rank that runs ahead keeps what a later one is about to read, as long as there are stages enough for both.
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


def choose_banks(wants: Sequence[Wants], stages: int) -> tuple[int, ...]:
    """The banks that should lie in `stages` stages, the most urgent one first. `wants` begins with this rank's own."""
    chosen: dict[int, None] = {}
    for is_running in (True, False):
        of_ranks = [want.banks for want in wants if want.is_running == is_running]
        for turn in itertools.zip_longest(*of_ranks):
            chosen |= dict.fromkeys(bank for bank in turn if bank is not None)
    return tuple(chosen)[:stages]


@dataclasses.dataclass(frozen=True)
class StagingState:
    """What a stage holds: the first `filled_slices` of a rank's shard of `bank`, or nothing.

    `generation` counts how often it was given to a bank: while that stays, bytes that are there stay.
    """

    bank: int | None = None
    generation: int = 0
    filled_slices: int = 0


@dataclasses.dataclass(frozen=True)
class Fill:
    """The next thing to copy: slice `slice_number` of this rank's shard of `bank`, into `stage`."""

    stage: int
    bank: int
    slice_number: int


class StagingPlan:
    """What each of a rank's stages holds, and which slice goes into which stage next."""

    def __init__(self, stages: int, slices: Sequence[int]) -> None:
        """`slices` says for each bank of how many slices this rank's shard consists."""
        self.states = [StagingState() for _ in range(stages)]
        self._slices = tuple(slices)
        self._chosen: tuple[int, ...] = ()
        # StagingBuffers, the one that has held its bank for longest first.
        self._by_age = list(range(stages))

    def choose(self, chosen: Sequence[int]) -> list[int]:
        """From now on `chosen`, no more banks than stages, should be there, the most urgent one first.

        Gives the stages whose bank is another one now: their bytes may be overwritten from now on, not before.
        """
        self._chosen = tuple(chosen)
        held = {state.bank for state in self.states}
        idle = [stage for stage in self._by_age if self.states[stage].bank not in self._chosen]
        taken = []
        for bank, stage in zip([bank for bank in self._chosen if bank not in held], idle, strict=False):
            self.states[stage] = StagingState(bank, self.states[stage].generation + 1)
            self._by_age.remove(stage)
            self._by_age.append(stage)
            taken.append(stage)
        return taken

    def next_fill(self) -> Fill | None:
        """What to copy next: of the most urgent bank that is not complete; None where all are."""
        stage_of = {state.bank: stage for stage, state in enumerate(self.states)}
        for bank in self._chosen:
            state = self.states[stage_of[bank]]
            if state.filled_slices < self._slices[bank]:
                return Fill(stage_of[bank], bank, state.filled_slices)
        return None

    def filled(self, stage: int) -> None:
        """What `next_fill` said for `stage` is there."""
        state = self.states[stage]
        self.states[stage] = dataclasses.replace(state, filled_slices=state.filled_slices + 1)
