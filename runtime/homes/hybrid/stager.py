"""Staging buffers: memory on the compute device for this rank's shards of the banks that ranks will read next.

runtime/homes/README.md describes them. Two ranks on one H100 have run them on GPUs; their speed is unmeasured.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Sequence

import torch

from moepass.models.errors import MoepassError
from moepass.runtime.homes.hybrid.staging_board import MOST_BANKS, MOST_SLICES, StagingBoard
from moepass.runtime.homes.hybrid.staging_order import StagingPlan, StagingState, choose_banks
from moepass.runtime.system.background import run_in_background
from moepass.runtime.system.forking import finalize_in_owner
from moepass.runtime.transfer import lanes
from moepass.runtime.transfer.learned_order import LearnedOrder
from moepass.runtime.transfer.link import BusyLink
from moepass.runtime.transfer.recording import recorded_event
from moepass.runtime.transfer.sources import MemorySource, Source

# [Empirical] Pauses between two reads of the other ranks' needs. The first is shorter than the copy of a bank. The
# second is the longest delay of an idle rank that begins a run.
_BUSY_PAUSE_S, _IDLE_PAUSE_S = 0.002, 0.05
# On a device the link is idle while the thread waits for the end of a slice, so slices are large.
_SLICES_AT_ONCE = 4


class StagerError(MoepassError, RuntimeError):
    """The thread that fills the staging buffers of this rank ended with an error."""


class Found(enum.Enum):
    """The reason why a staging buffer does not hold the requested bytes."""

    COMING = "not there yet, but on its way"
    ABSENT = "not there"


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer that holds the requested bytes, and its state when it was looked up."""

    buffer: int
    state: StagingState


class StagingBuffers:
    """The staging buffers of one rank, as readers see them; `board` describes them.

    Each of `memories`, flat uint8, is as long as the rank's largest shard. It is filled in slices of `slice_bytes`, the
    same on all ranks. `keeps` must live as long as the buffers are read.
    """

    def __init__(
        self,
        board: StagingBoard,
        memories: Sequence[torch.Tensor],
        slice_bytes: int = lanes.SLICE_BYTES,
        keeps: object = None,
    ) -> None:
        self.board = board
        self.memories = tuple(memories)
        self.slice_bytes = slice_bytes
        self._keeps = keeps

    def slices(self, nbytes: int) -> int:
        """Return the number of slices in `nbytes`."""
        return -(-nbytes // self.slice_bytes)

    def find_buffer(self, bank: int, offset_bytes: int, nbytes: int) -> Held | Found:
        """Return the buffer that holds these bytes of the rank's shard of `bank`, or COMING, or ABSENT."""
        for buffer in range(len(self.memories)):
            state = self.board.state(buffer)
            if state.bank == bank:
                return Found.COMING if state.filled_slices < self.slices(offset_bytes + nbytes) else Held(buffer, state)
        return Found.ABSENT

    def still_holds(self, held: Held) -> bool:
        """Return whether no byte of the buffer was overwritten since `find_buffer`. Call it after reading the bytes."""
        # A writer changes the word before it overwrites a byte.
        now = self.board.state(held.buffer)
        return (now.bank, now.generation) == (held.state.bank, held.state.generation)

    def write(self, buffer: int, shard: Source, offset_bytes: int, nbytes: int) -> None:
        """Copy bytes of `shard` to their offset in a buffer of this rank. The copy is complete on return."""
        shard.copy(offset_bytes, nbytes, self.memories[buffer].data_ptr() + offset_bytes)


class DeviceStagingBuffers(StagingBuffers):
    """Staging buffers in device memory, filled on `stream`; it is None for the buffers of another rank."""

    def __init__(
        self, board: StagingBoard, memories: Sequence[torch.Tensor], stream: torch.cuda.Stream | None, keeps: object
    ) -> None:
        super().__init__(board, memories, _SLICES_AT_ONCE * lanes.SLICE_BYTES, keeps)
        self._stream = stream

    def write(self, buffer: int, shard: Source, offset_bytes: int, nbytes: int) -> None:
        """Copy bytes of `shard` into a buffer of this rank, and wait for the copy."""
        assert self._stream is not None, "each rank fills its own buffers"
        assert isinstance(shard, MemorySource), "shards rest in host memory"
        with torch.cuda.stream(self._stream):
            target = self.memories[buffer].narrow(0, offset_bytes, nbytes)
            target.copy_(shard.memory.narrow(0, offset_bytes, nbytes), non_blocking=True)
            done = recorded_event(self._stream)
        done.synchronize()


class Stager:
    """A thread that fills this rank's staging buffers `own` over the host `link`, and ends with this object.

    `others` are the boards of the other ranks. `shards` are this rank's shards of all banks, by index; the pieces of
    each cover all its bytes.
    """

    def __init__(
        self, own: StagingBuffers, others: Sequence[StagingBoard], shards: Sequence[Source], link: BusyLink
    ) -> None:
        self._own = own
        self._order: LearnedOrder[int, int] = LearnedOrder()
        self._banks = len(shards)
        self._work = _StagerWork(own, others, shards, link)
        # The thread must not keep this object alive, so it has no reference to it.
        run_in_background(self._work.run, self._work.stop, "moepass-stager")
        finalize_in_owner(self, self._work.stop)

    def check(self) -> None:
        """Raise StagerError if the thread ended with an error."""
        if self._work.error is not None:
            raise StagerError(
                f"the staging buffers of this rank are no longer filled: {self._work.error}"
            ) from self._work.error

    def learn(self, bank: int) -> None:
        """Record that a copy of `bank` was requested."""
        self._order.learn(bank, bank)

    def reading(self, bank: int) -> None:
        """Publish that this rank is copying `bank` into a slot, and the banks that it needs next."""
        self._show([bank, *self._following(bank)])

    def has_read(self, bank: int) -> None:
        """Publish the banks that this rank needs next, after the copy of `bank` has ended."""
        self._show(self._following(bank))

    def show_running(self, is_running: bool) -> None:
        """Publish whether this rank is in a run."""
        self._own.board.show_running(is_running)
        self._work.changed.set()

    def _following(self, bank: int) -> list[int]:
        following: list[int] = []
        for _ in range(min(len(self._own.memories), self._banks - 1)):
            # The next run begins after the last bank.
            bank = self._order.after(bank, bank + 1) % self._banks
            following.append(bank)
        return following

    def _show(self, banks: Sequence[int]) -> None:
        self._own.board.show_wants(tuple(dict.fromkeys(banks)))
        self._work.changed.set()


class _StagerWork:
    """The work of the staging thread, which copies the slices that ranks need into this rank's buffers."""

    def __init__(
        self, own: StagingBuffers, others: Sequence[StagingBoard], shards: Sequence[Source], link: BusyLink
    ) -> None:
        slices = [own.slices(shard.nbytes) for shard in shards]
        assert len(shards) <= MOST_BANKS, "the index of a bank fits its bits of a word"
        assert max(slices, default=0) <= MOST_SLICES, "the number of slices fits its bits of a word"
        self.own = own
        self.boards = (own.board, *others)
        self.shards = tuple(shards)
        self.plan = StagingPlan(len(own.memories), slices)
        self.link = link
        self.changed = threading.Event()
        self.stopped = threading.Event()
        self.error: BaseException | None = None

    def step(self) -> bool:
        """Copy the most urgent slice. Returns False if all slices are in the buffers."""
        wants = [board.wants() for board in self.boards]
        for buffer in self.plan.choose(choose_banks(wants, len(self.own.memories))):
            # Before the first byte: see `StagingBuffers.still_holds`.
            self.own.board.show_state(buffer, self.plan.states[buffer])
        fill = self.plan.next_fill()
        if fill is None:
            return False
        shard = self.shards[fill.bank]
        offset = fill.slice_number * self.own.slice_bytes
        nbytes = min(self.own.slice_bytes, shard.nbytes - offset)
        began = time.perf_counter()
        self.own.write(fill.buffer, shard, offset, nbytes)
        self.link.moved(nbytes, began, self.stopped)
        self.plan.filled(fill.buffer)
        self.own.board.show_state(fill.buffer, self.plan.states[fill.buffer])
        self.own.board.show_progress()
        return True

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                self.changed.clear()
                if not self.step():
                    is_busy = any(board.wants().is_running for board in self.boards)
                    self.changed.wait(_BUSY_PAUSE_S if is_busy else _IDLE_PAUSE_S)
        except BaseException as error:  # the next `check` raises it
            self.error = error

    def stop(self) -> None:
        self.own.board.show_running(False)
        self.own.board.show_wants(())
        self.stopped.set()
        self.changed.set()
