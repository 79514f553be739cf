"""A copy thread: fills slots in the background, one copy after the other, sliced so that it can be abandoned."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref

import torch

from moepass.models.errors import MoepassError
from moepass.runtime.link import Link

# [Empirical] Large enough that the interpreter lock, taken once per slice, does not show; small enough that an
# abandoned copy ends within a millisecond or two.
SLICE_BYTES = 4 << 20


class CopyError(MoepassError, RuntimeError):
    """A bank could not be brought into its slot."""


class PendingCopy:
    """One copy: queued, running or finished. `wait` gives what went wrong, to the thread that needs the bytes."""

    def __init__(self, source: torch.Tensor, slot: torch.Tensor, label: str) -> None:
        self.source = source
        self.slot = slot
        self.label = label
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        """Nobody needs the bytes any more; `finished` follows soon."""
        self.abandoned.set()

    def wait(self) -> None:
        """Block until the slot is full. Raises CopyError where the copy failed."""
        self.finished.wait()
        if self.error is not None:
            raise CopyError(f"bank {self.label} could not be copied into its slot: {self.error}") from self.error


class CopyThread:
    """Copies in the order of `submit`, on a thread of its own that ends with this object."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._queue: queue.SimpleQueue[PendingCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._queue, link), name="moepass-copy", daemon=True)
        self._thread.start()
        # The thread must not keep its owner alive, so it knows only the queue.
        weakref.finalize(self, self._queue.put, None)

    def submit(self, copy: PendingCopy) -> PendingCopy:
        self._queue.put(copy)
        return copy


def _run(copies: queue.SimpleQueue[PendingCopy | None], link: Link) -> None:
    while (copy := copies.get()) is not None:
        try:
            _perform(copy, link)
        except BaseException as error:  # handed to the thread that waits, which raises it
            copy.error = error
        finally:
            copy.finished.set()
        del copy


def _perform(copy: PendingCopy, link: Link) -> None:
    source, slot = copy.source, copy.slot
    nbytes = source.numel()
    if not (source.is_contiguous() and slot.is_contiguous()) or slot.numel() < nbytes:
        raise ValueError(f"{nbytes} contiguous bytes do not fit a slot of {slot.numel()}")
    started = time.perf_counter()
    # memmove releases the interpreter lock and uses this thread alone, where Tensor.copy_ would wake a whole pool.
    for start in range(0, nbytes, SLICE_BYTES):
        if copy.abandoned.is_set():
            return
        size = min(SLICE_BYTES, nbytes - start)
        ctypes.memmove(slot.data_ptr() + start, source.data_ptr() + start, size)
    remaining = started + link.seconds(nbytes) - time.perf_counter()
    if remaining > 0:
        copy.abandoned.wait(remaining)
