"""Words in shared memory by which a rank tells the others what its stages hold, and what it is going to read.

A board has one writer, its rank, and readers everywhere that never wait. Each word is written and read as a whole. All
that must be known of one stage is in one word, so that what lies in a stage is told from what lay there before by
reading its word before and after its bytes: a writer changes the word first, then the bytes.
"""

from __future__ import annotations

import ctypes
import platform

import torch

from moepass.models.errors import InputError
from moepass.runtime.homes.hybrid.staging_order import StagingState, Wants

_WORD_BYTES = 8
# The parts of a stage's word. A generation comes again after 2**32 banks, a matter of weeks, and does harm only if that
# happens to the very bank that is being read, while one slice of it is.
_FILLED_BITS, _BANK_BITS, _GENERATION_BITS = 16, 16, 32
MOST_BANKS, MOST_SLICES = (1 << _BANK_BITS) - 1, (1 << _FILLED_BITS) - 1
# Words before those that there is one of for each stage: slices copied so far, and whether a run is under way.
_PROGRESS, _IS_RUNNING, _FIRST_WANT = 0, 1, 2
# Where the processor lets others see stores in the order in which they were made, and loads are made in order.
_ORDERED_MACHINES = ("x86_64", "AMD64")


def check_machine() -> None:
    """Raises InputError where words and bytes in shared memory could be seen in another order than they were written.

    Python has no memory fence, so this is asked of the processor.
    """
    if platform.machine() not in _ORDERED_MACHINES:
        raise InputError(
            f"this machine is {platform.machine()!r}; home='hybrid' works on x86-64 only so far, because other "
            "processors may show a stage's bytes before the word that says what they are; use home='peer'"
        )


def board_bytes(stages: int) -> int:
    """Bytes of the board of a rank with that many stages."""
    return _WORD_BYTES * (_FIRST_WANT + 2 * stages)


def pack_state(state: StagingState) -> int:
    """A stage's state as its word; a fresh word is 0, and so is the state of an empty stage."""
    bank = 0 if state.bank is None else state.bank + 1
    generation = state.generation % (1 << _GENERATION_BITS)
    return generation << (_BANK_BITS + _FILLED_BITS) | bank << _FILLED_BITS | state.filled_slices


def unpack_state(word: int) -> StagingState:
    """The state that a stage's word says."""
    bank = word >> _FILLED_BITS & MOST_BANKS
    return StagingState(bank - 1 if bank else None, word >> (_BANK_BITS + _FILLED_BITS), word & MOST_SLICES)


class StagingBoard:
    """The board of one rank, in `memory` (flat uint8, `board_bytes` long), which only its own process may write."""

    def __init__(self, memory: torch.Tensor, stages: int) -> None:
        assert memory.numel() >= board_bytes(stages), "a board has its size"
        assert memory.data_ptr() % _WORD_BYTES == 0, "words are written as a whole where they are aligned"
        self.stages = stages
        self._memory = memory  # which the words lie in
        self._words = (ctypes.c_uint64 * (_FIRST_WANT + 2 * stages)).from_address(memory.data_ptr())

    def wants(self) -> Wants:
        """What the rank is going to read. One of its words may be older than another: it is a hint."""
        words = self._words[_FIRST_WANT : _FIRST_WANT + self.stages]
        return Wants(tuple(word - 1 for word in words if word), bool(self._words[_IS_RUNNING]))

    def show_wants(self, banks: tuple[int, ...]) -> None:
        """The rank is going to read `banks`, the first one now; as many as there are stages count."""
        for number in range(self.stages):
            self._words[_FIRST_WANT + number] = banks[number] + 1 if number < len(banks) else 0

    def show_running(self, is_running: bool) -> None:
        self._words[_IS_RUNNING] = int(is_running)

    def state(self, stage: int) -> StagingState:
        return unpack_state(self._words[_FIRST_WANT + self.stages + stage])

    def show_state(self, stage: int, state: StagingState) -> None:
        self._words[_FIRST_WANT + self.stages + stage] = pack_state(state)

    def progress(self) -> int:
        """Slices that the rank has copied into stages so far."""
        return self._words[_PROGRESS]

    def show_progress(self) -> None:
        """One more slice was copied."""
        self._words[_PROGRESS] += 1


__all__ = [
    "MOST_BANKS", "MOST_SLICES", "StagingBoard", "board_bytes", "check_machine", "pack_state", "unpack_state",
]  # fmt: skip
