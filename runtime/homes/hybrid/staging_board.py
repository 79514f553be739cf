"""Words in shared memory in which a rank shows what its staging buffers hold, and which banks it will read next.

A board has one writer, its rank. All ranks read it, and none waits. A word is written and read as a whole, and one word
describes one buffer. A writer changes the word first, then the bytes. So a reader that finds the same word before and
after it copied the bytes knows that they were not overwritten meanwhile.
"""

from __future__ import annotations

import ctypes
import platform

import torch

from moepass.models.errors import InputError
from moepass.runtime.homes.hybrid.staging_order import StagingState, Wants

_WORD_BYTES = 8
# The parts of a buffer's word. A generation is used again after 2**32 banks, which takes weeks. That is a mistake only
# if it happens to the bank that is being read, while one slice of it is read.
_FILLED_BITS, _BANK_BITS, _GENERATION_BITS = 16, 16, 32
MOST_BANKS, MOST_SLICES = (1 << _BANK_BITS) - 1, (1 << _FILLED_BITS) - 1
# Words that a board has once, before those for each buffer: slices copied so far, and whether a run is under way.
_PROGRESS, _IS_RUNNING, _FIRST_WANT = 0, 1, 2
# Processors that show stores to others in the order in which they were made, and that load in order.
_ORDERED_MACHINES = ("x86_64", "AMD64")


def check_machine() -> None:
    """Raises InputError where the processor may show writes to shared memory in another order than they were made.

    Python has no memory fence, so moepass depends on the processor for this order.
    """
    if platform.machine() not in _ORDERED_MACHINES:
        raise InputError(
            f"this machine is {platform.machine()!r}; home='hybrid' works on x86-64 only so far, because other "
            "processors may show the bytes of a staging buffer before the word that describes them; use home='peer'",
            name="machine",
            value=platform.machine(),
            expected=_ORDERED_MACHINES,
        )


def board_bytes(buffers: int) -> int:
    """Bytes of the board of a rank with so many staging buffers."""
    return _WORD_BYTES * (_FIRST_WANT + 2 * buffers)


def pack_state(state: StagingState) -> int:
    """The word for the state of a buffer. An empty buffer has the word 0, as fresh memory does."""
    bank = 0 if state.bank is None else state.bank + 1
    generation = state.generation % (1 << _GENERATION_BITS)
    return generation << (_BANK_BITS + _FILLED_BITS) | bank << _FILLED_BITS | state.filled_slices


def unpack_state(word: int) -> StagingState:
    """The state that the word of a buffer stands for."""
    bank = word >> _FILLED_BITS & MOST_BANKS
    return StagingState(bank - 1 if bank else None, word >> (_BANK_BITS + _FILLED_BITS), word & MOST_SLICES)


class StagingBoard:
    """The board of one rank, in `memory` (flat uint8, `board_bytes` long), which only its own process may write."""

    def __init__(self, memory: torch.Tensor, buffers: int) -> None:
        assert memory.numel() >= board_bytes(buffers), "the memory is too small for the board"
        assert memory.data_ptr() % _WORD_BYTES == 0, "words must be aligned: only then are they written as a whole"
        self.buffers = buffers
        self._memory = memory  # keeps the words alive
        self._words = (ctypes.c_uint64 * (_FIRST_WANT + 2 * buffers)).from_address(memory.data_ptr())

    def wants(self) -> Wants:
        """The banks that the rank will read next. Only a hint: some of its words may be older than others."""
        words = self._words[_FIRST_WANT : _FIRST_WANT + self.buffers]
        return Wants(tuple(word - 1 for word in words if word), bool(self._words[_IS_RUNNING]))

    def show_wants(self, banks: tuple[int, ...]) -> None:
        """The rank will read `banks`, the first one now. Banks beyond the number of buffers are left out."""
        for number in range(self.buffers):
            self._words[_FIRST_WANT + number] = banks[number] + 1 if number < len(banks) else 0

    def show_running(self, is_running: bool) -> None:
        self._words[_IS_RUNNING] = int(is_running)

    def state(self, buffer: int) -> StagingState:
        return unpack_state(self._words[_FIRST_WANT + self.buffers + buffer])

    def show_state(self, buffer: int, state: StagingState) -> None:
        self._words[_FIRST_WANT + self.buffers + buffer] = pack_state(state)

    def progress(self) -> int:
        """Slices that the rank has copied into its buffers so far."""
        return self._words[_PROGRESS]

    def show_progress(self) -> None:
        """One more slice was copied."""
        self._words[_PROGRESS] += 1


__all__ = [
    "MOST_BANKS", "MOST_SLICES", "StagingBoard", "board_bytes", "check_machine", "pack_state", "unpack_state",
]  # fmt: skip
