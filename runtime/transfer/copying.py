"""A copy thread: fills slots in the background, one copy after the other, sliced so that it can be abandoned."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from moepass.models.errors import MoepassError
from moepass.passes.machine.times import SLICE_BYTES as SLICE_BYTES
from moepass.passes.machine.times import stream_slice_bytes
from moepass.runtime.system.background import run_in_background
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.transfer.copier import Decoder
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import Moment
from moepass.runtime.transfer.sources import Source, whole


class CopyError(MoepassError, RuntimeError):
    """A bank could not be brought into its slot."""


class PendingCopy:
    """One copy: queued, running or finished. `wait` gives what went wrong, to the thread that needs the bytes.

    A tensor as `sources` stands for all of its bytes, to the start of the slot. With home `hybrid`, `staged_bytes` came
    from staging buffers so far, and `unstaged_bytes` from host memory.
    """

    staged_bytes = 0
    unstaged_bytes = 0

    def __init__(self, sources: torch.Tensor | Sequence[Source], slot: torch.Tensor, label: str) -> None:
        self.sources = (whole(sources),) if isinstance(sources, torch.Tensor) else tuple(sources)
        self.slot = slot
        self.label = label
        self.finished = threading.Event()
        # When it began and ended: in the copy thread, of `time.perf_counter`, or on a stream; for recordings.
        self.performed: tuple[Moment, Moment] | None = None
        self.error: BaseException | None = None
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        """Nobody needs the bytes any more; `finished` follows soon."""
        self.abandoned.set()

    def end(self) -> None:
        """Block until nothing is written to the slot any more, whatever became of the copy."""
        self.finished.wait()

    def wait(self) -> None:
        """Block until the copy thread has done its part. Raises CopyError where the copy failed."""
        self.finished.wait()
        if isinstance(self.error, CopyError):
            raise self.error
        if self.error is not None:
            raise CopyError(
                f"bank {self.label} could not be copied into its slot: {self.error}",
                name=self.label,
                path=getattr(self.error, "path", None),
                rank=getattr(self.error, "rank", None),
                ranks=getattr(self.error, "ranks", None),
            ) from self.error

    def perform(self, link: Link) -> None:
        """Fill the slot, here and now, unless the copy is abandoned. Raises ValueError where a piece does not fit."""
        check_slot(self.sources, self.slot)
        for source in self.sources:
            source.check_bounds()
        started = time.perf_counter()
        for source, offset, size, place in slices_in_turn(self.sources):
            if self.abandoned.is_set():
                return
            source.copy(offset, size, self.slot.data_ptr() + place)
        self.wait_for_link(link, started)

    def wait_for_link(self, link: Link, started: float) -> None:
        """Wait until the transfer that began at `started` (of `time.perf_counter`) has taken the time of an emulated
        link.
        """
        over_link = sum(source.nbytes for source in self.sources if source.over_link)
        remaining = started + link.seconds(over_link) - time.perf_counter()
        if remaining > 0:
            self.abandoned.wait(remaining)


class PendingDecode(PendingCopy):
    """The decode behind a copy: whoever waits for it has waited for both."""

    def __init__(self, copied: PendingCopy, decoder: Decoder, link: torch.Tensor, slot: torch.Tensor) -> None:
        super().__init__((), slot, copied.label)
        self._copied = copied
        self._decoder = decoder
        self._link = link

    def abandon(self) -> None:
        self._copied.abandon()
        super().abandon()

    def perform(self, link: Link) -> None:
        self._copied.wait()
        if not self.abandoned.is_set():
            self._decoder(self._link, self.slot)


class CopyThread:
    """Copies in the order of `submit`, on a thread of its own that ends with this object."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._owner = OwnerProcess()
        # The thread must not keep its owner alive, so it knows only the work.
        self._work = _CopyWork(link)
        self._thread = run_in_background(self._work.run, self._work.stop_now, "moepass-copy")
        weakref.finalize(self, self._work.queue.put, None)

    def submit(self, copy: PendingCopy) -> PendingCopy:
        self._owner.check()
        self._work.queue.put(copy)
        return copy


class _CopyWork:
    """The state of the copy thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.queue: queue.SimpleQueue[PendingCopy | None] = queue.SimpleQueue()
        self._current: PendingCopy | None = None
        self._is_over = False

    def run(self) -> None:
        while (copy := self.queue.get()) is not None:
            self._current = copy
            if self._is_over:
                copy.abandon()
            carry_out(copy, self.link)
            self._current = None
            del copy

    def stop_now(self) -> None:
        """Abandon the copy that runs, and all that wait."""
        self._is_over = True
        copy = self._current
        if copy is not None:
            copy.abandon()
        self.queue.put(None)


def carry_out(copy: PendingCopy, link: Link) -> None:
    """Perform `copy` in this thread, and say so; an error is handed to the thread that waits, which raises it."""
    started = time.perf_counter()
    try:
        copy.perform(link)
    except BaseException as error:
        copy.error = error
    finally:
        copy.performed = copy.performed or (started, time.perf_counter())
        copy.finished.set()


def check_slot(sources: Sequence[Source], slot: torch.Tensor) -> None:
    """Raises ValueError where a piece would leave the slot."""
    needed = max((piece.slot_offset_bytes + piece.nbytes for source in sources for piece in source.pieces), default=0)
    if not slot.is_contiguous() or slot.numel() < needed:
        raise ValueError(f"{needed} contiguous bytes do not fit a slot of {slot.numel()}")


# A source, an offset in it, a number of bytes, and the offset in the slot that they go to.
Slice = tuple[Source, int, int, int]


def slices(source: Source, slice_bytes: int | None = None) -> Iterator[Slice]:
    """The transfers of a copy from `source`, slice by slice; by default slices of SLICE_BYTES."""
    step = slice_bytes or SLICE_BYTES
    for piece in source.pieces:
        for start in range(0, piece.nbytes, step):
            size = min(step, piece.nbytes - start)
            yield source, piece.source_offset_bytes + start, size, piece.slot_offset_bytes + start


def slices_in_turn(sources: Sequence[Source], slice_bytes: int | None = None) -> Iterator[Slice]:
    """One slice of each source, then the next of each, so that no source is read in one go while others rest."""
    for turn in itertools.zip_longest(*[slices(source, slice_bytes) for source in sources]):
        yield from (part for part in turn if part is not None)


def slices_for_stream(sources: Sequence[Source]) -> Iterator[Slice]:
    """As `slices_in_turn`, in so few slices that the host is not kept from issuing kernels.

    What comes from one place is not cut at all: there is none to take turns with, and no copy of a stream can be
    abandoned.
    """
    nbytes = sum(source.nbytes for source in sources)
    places = sum(1 for source in sources if source.pieces)
    return slices_in_turn(sources, stream_slice_bytes(nbytes) if places > 1 else max(1, nbytes))
