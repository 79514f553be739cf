"""Words in shared memory in which a rank shows the contents of its staging buffers and the banks it will read next.

A board has one writer, its rank. All ranks read it, and none waits. A word is written and read atomically, and one word
describes one buffer. A writer changes the word first, then the bytes. So a reader that reads the same word before and
after it copies the bytes knows that they were not overwritten in between.
"""

from __future__ import annotations

import ctypes
import platform

import torch

from moepass.models.errors import InputError
from moepass.runtime.homes.hybrid.staging_order import StagingState, Wants

_WORD_BYTES = 8
# The bits of a buffer's word. A generation repeats after 2**32 banks, which takes weeks. A repeat is an error only if
# it happens to the bank that is being read, while one slice of it is read.
_FILLED_BITS, _BANK_BITS, _GENERATION_BITS = 16, 16, 32
MOST_BANKS, MOST_SLICES = (1 << _BANK_BITS) - 1, (1 << _FILLED_BITS) - 1
# Words at the start of a board, before those for each buffer: slices copied so far, whether a run is under way, and the
# first of the banks that the rank needs.
_PROGRESS, _IS_RUNNING, _FIRST_WANT = 0, 1, 2
# Processors that make stores visible in program order, and that load in program order.
_ORDERED_MACHINES = ("x86_64", "AMD64")


def check_machine() -> None:
    """Raise InputError if the processor may show writes to shared memory in another order than they were made.

    Python has no memory fence, so moepass depends on the processor for this order.
    """
    if platform.machine() not in _ORDERED_MACHINES:
        text = (
            f"this machine is {platform.machine()!r}; home='hybrid' works on x86-64 only, because on other processors "
            "the bytes of a staging buffer may become visible before the word that describes them; use home='peer'"
        )
        raise InputError(text, name="machine", value=platform.machine(), expected=_ORDERED_MACHINES)


def board_bytes(buffers: int) -> int:
    """Return the bytes of the board of a rank with that number of staging buffers."""
    return _WORD_BYTES * (_FIRST_WANT + 2 * buffers)


def pack_state(state: StagingState) -> int:
    """Return the word for the state of a buffer. An empty buffer has the word 0, as fresh memory does."""
    bank = 0 if state.bank is None else state.bank + 1
    generation = state.generation % (1 << _GENERATION_BITS)
    return generation << (_BANK_BITS + _FILLED_BITS) | bank << _FILLED_BITS | state.filled_slices


def unpack_state(word: int) -> StagingState:
    """Return the state that a word encodes."""
    bank = word >> _FILLED_BITS & MOST_BANKS
    return StagingState(bank - 1 if bank else None, word >> (_BANK_BITS + _FILLED_BITS), word & MOST_SLICES)


class StagingBoard:
    """The board of one rank, in `memory` (flat uint8, `board_bytes` long). Only its own process may write to it."""

    def __init__(self, memory: torch.Tensor, buffers: int) -> None:
        assert memory.numel() >= board_bytes(buffers), "the memory is too small for the board"
        assert memory.data_ptr() % _WORD_BYTES == 0, "words must be aligned: only then are they written as a whole"
        self.buffers = buffers
        self._memory = memory  # keeps the words alive
        self._words = (ctypes.c_uint64 * (_FIRST_WANT + 2 * buffers)).from_address(memory.data_ptr())

    def wants(self) -> Wants:
        """Return the banks that the rank will read next. This is a hint: some words may be older than others."""
        words = self._words[_FIRST_WANT : _FIRST_WANT + self.buffers]
        return Wants(tuple(word - 1 for word in words if word), bool(self._words[_IS_RUNNING]))

    def show_wants(self, banks: tuple[int, ...]) -> None:
        """Publish that the rank will read `banks`, the first one now. Ignores banks beyond the number of buffers."""
        for number in range(self.buffers):
            self._words[_FIRST_WANT + number] = banks[number] + 1 if number < len(banks) else 0

    def show_running(self, is_running: bool) -> None:
        """Publish whether the rank is in a run."""
        self._words[_IS_RUNNING] = int(is_running)

    def state(self, buffer: int) -> StagingState:
        """Return the contents of a buffer."""
        return unpack_state(self._words[_FIRST_WANT + self.buffers + buffer])

    def show_state(self, buffer: int, state: StagingState) -> None:
        """Publish the contents of a buffer."""
        self._words[_FIRST_WANT + self.buffers + buffer] = pack_state(state)

    def progress(self) -> int:
        """Return the number of slices that the rank has copied into its buffers."""
        return self._words[_PROGRESS]

    def show_progress(self) -> None:
        """Publish that one more slice was copied."""
        self._words[_PROGRESS] += 1
