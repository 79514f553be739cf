"""Copies and decodes into slots: the record of one of them, its action, and the thread that performs them."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch

from moepass.models.errors import MoepassError
from moepass.passes.ir.timeline import COPY, DECODE
from moepass.runtime.system.background import run_in_background
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.transfer.lanes import HOST_LANE, Lane
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.recording import Moment
from moepass.runtime.transfer.sources import Source, check_slot

# Writes the bytes of a slot (second argument) from the bytes that the link carried (first); both are flat uint8.
Decoder = Callable[[torch.Tensor, torch.Tensor], None]


class CopyError(MoepassError, RuntimeError):
    """A bank could not be copied into its slot."""


class Action:
    """The work of a copy: how its slot is filled. By default it copies the bytes of all sources, slice by slice.

    `stream` is the name of the work in timelines, and of the stream that shows it.
    """

    stream = COPY

    def fill(self, copy: SlotCopy, link: Link) -> None:
        """Fill the slot of `copy` on its lane, unless the copy is abandoned, and take the time of an emulated `link`.

        Raises ValueError if a piece does not fit.
        """
        copy.check_bounds()
        started = time.perf_counter()
        if copy.bring(copy.sources):
            copy.wait_for_link(link, started)

    def stages(self, copy: SlotCopy) -> tuple[SlotCopy, ...]:
        """Return the work that fills a slot if `copy` comes last: a copy alone, or a copy and a decode."""
        return (copy,)

    def raise_error(self, label: str, error: BaseException) -> NoReturn:
        """Raise `error`, the failure of the copy of bank `label`, in the thread that waits for the copy."""
        if isinstance(error, CopyError):
            raise error
        raise CopyError(
            f"bank {label} could not be copied into its slot: {error}",
            name=label,
            path=getattr(error, "path", None),
            rank=getattr(error, "rank", None),
            ranks=getattr(error, "ranks", None),
        ) from error


COPY_BYTES = Action()


class DecodeAction(Action):
    """Fills the slot by `decoder` from the bytes at `encoded`, which the copy `copied` has brought."""

    stream = DECODE

    def __init__(self, copied: SlotCopy, decoder: Decoder, encoded: torch.Tensor) -> None:
        self._copied, self._decoder, self._encoded = copied, decoder, encoded

    def fill(self, copy: SlotCopy, link: Link) -> None:
        """Decode. Raises the error of the copy if that failed."""
        self._copied.wait()
        if not copy.abandoned.is_set():
            self._decoder(self._encoded, copy.slot)

    def stages(self, copy: SlotCopy) -> tuple[SlotCopy, ...]:
        """Return the copy that brought the bytes, and its decode."""
        return (self._copied, copy)


class SlotCopy:
    """One copy or decode into a slot, or one copy into an encoded buffer: queued, running or finished.

    Attributes:
        sources: The memory or files to read, into `slot`, flat uint8. Empty for a decode.
        label: The name of the bank, for errors and timelines.
        after: The moment at which the slot is free. None if it is free already.
        follows: The work, on any lane, that must end before this begins: the copy whose bytes are decoded, the last
            decode from the encoded buffer, or abandoned work into the slot. None once this has ended.
        began: The moment at which its run began; sources may be written until then. None outside of runs.
        abandoned: Set once no run needs the bytes; `finished` follows soon.
        finished: Set once the thread has done its part. On a stream the bytes may arrive later: see `filled`.
        performed: The moments at which the copy began and ended, on its lane. None until then.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        slot: torch.Tensor,
        label: str,
        action: Action = COPY_BYTES,
        lane: Lane = HOST_LANE,
        after: object = None,
        follows: SlotCopy | None = None,
        began: object = None,
    ) -> None:
        self.sources, self.slot, self.label = tuple(sources), slot, label
        self.action, self.lane, self.after, self.follows, self.began = action, lane, after, follows, began
        self.abandoned = threading.Event()
        self.finished = threading.Event()
        self.performed: tuple[Moment, Moment] | None = None
        self.error: BaseException | None = None
        self.staged_bytes = 0
        self.unstaged_bytes = 0

    @property
    def stages(self) -> tuple[SlotCopy, ...]:
        """The work that has filled the slot once this is finished, in order."""
        return self.action.stages(self)

    @property
    def stream(self) -> str:
        """The stream of timelines that shows this."""
        return self.action.stream

    @property
    def filled(self) -> Moment:
        """The moment at which the slot was full. The copy must be finished."""
        assert self.performed is not None, "the copy is finished"
        return self.performed[1]

    def end(self) -> None:
        """Block until nothing is written to the slot any more, whether the copy succeeded or not."""
        self.finished.wait()
        self.lane.wait_on_host(self.filled)

    def wait(self) -> None:
        """Block until the copy is finished. Raises CopyError, or PeerError for a gather, if it failed."""
        self.finished.wait()
        if self.error is not None:
            self.action.raise_error(self.label, self.error)

    def perform(self, link: Link) -> None:
        """Fill the slot on the lane, in the calling thread, unless the copy is abandoned."""
        if self.follows is not None:
            self.follows.finished.wait()
        with self.lane.active():
            began = self.lane.begin(*self._awaited())
            try:
                self.action.fill(self, link)
            finally:
                self.performed = (began, self.lane.mark())
                self.lane.keep(self.filled, (self.sources, self.slot, self.action))
                # It would keep all work before it in memory.
                self.follows = None

    def _awaited(self) -> Iterator[object]:
        """Yield the moments at which the slot and its source are ready for this copy, which is performed now."""
        yield self.after
        yield self.began
        if self.follows is not None:
            yield self.follows.filled

    def wait_for_slot(self) -> None:
        """Block until the slot is free; while the copy is performed."""
        for moment in self._awaited():
            self.lane.wait_on_host(moment)

    def check_bounds(self) -> None:
        """Raise ValueError if a piece would leave its source or the slot."""
        check_slot(self.sources, self.slot)
        for source in self.sources:
            source.check_bounds()

    def bring(self, sources: Sequence[Source]) -> bool:
        """Copy the bytes of `sources` into the slot; return False if the copy was abandoned before the end."""
        for source, offset, size, slot_offset in self.lane.slices(sources):
            if self.abandoned.is_set():
                return False
            self.lane.bring(source, offset, self.slot.narrow(0, slot_offset, size))
        return True

    def wait_for_link(self, link: Link, started: float) -> None:
        """Block until an emulated link has had time to carry the bytes, from `started` (`time.perf_counter`) on."""
        over_link = sum(source.nbytes for source in self.sources if source.over_link)
        remaining = started + link.seconds(over_link) - time.perf_counter()
        if remaining > 0:
            self.abandoned.wait(remaining)


class CopyThread:
    """A thread that performs copies in the order of `submit`. It ends with this object."""

    def __init__(self, link: Link) -> None:
        self._owner = OwnerProcess()
        # The thread must not keep its owner alive, so it refers to the work alone.
        self._work = _CopyWork(link)
        run_in_background(self._work.run, self._work.stop_now, "moepass-copy")
        weakref.finalize(self, self._work.queue.put, None)

    def another(self) -> CopyThread:
        """Return another thread of this kind, for work that moves nothing over the link."""
        return CopyThread(Link())

    def submit(self, copy: SlotCopy) -> SlotCopy:
        """Queue `copy` and return it."""
        self._owner.check()
        self._work.queue.put(copy)
        return copy


class _CopyWork:
    """The loop of the copy thread: it carries out queued copies in order until it is stopped."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.queue: queue.SimpleQueue[SlotCopy | None] = queue.SimpleQueue()
        self._current: SlotCopy | None = None
        self._is_over = False

    def run(self) -> None:
        while (copy := self.queue.get()) is not None:
            self._current = copy
            if self._is_over:
                copy.abandoned.set()
            carry_out(copy, self.link)
            self._current = None
            del copy

    def stop_now(self) -> None:
        """Abandon the running copy and all queued ones."""
        self._is_over = True
        if (copy := self._current) is not None:
            copy.abandoned.set()
        self.queue.put(None)


def carry_out(copy: SlotCopy, link: Link) -> None:
    """Perform `copy` in the calling thread; `copy.wait` raises its error in the thread that waits."""
    started = time.perf_counter()
    try:
        copy.perform(link)
    except BaseException as error:
        copy.error = error
    finally:
        copy.performed = copy.performed or (started, time.perf_counter())
        copy.finished.set()
