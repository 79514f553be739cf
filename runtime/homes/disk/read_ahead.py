"""A thread that announces files to the kernel, so that a disk reads the next bank while this one is copied."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import weakref
from collections.abc import Sequence

from moepass.runtime.homes.disk.disk_files import FileSource
from moepass.runtime.system.background import run_in_background


class ReadAhead:
    """Announces what it is given, the latest first; what is overtaken before its turn is left out.

    A thread of its own, because announcing takes time of its own: the kernel makes room for every page, and waits where
    the disk has enough to do. Where the platform has no such call, nothing happens, and nothing is slower than before.
    """

    _queue: queue.SimpleQueue[Sequence[FileSource] | None]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_started = False

    def announce(self, sources: Sequence[FileSource]) -> None:
        """Returns at once."""
        if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
            return
        with self._lock:
            if not self._has_started:
                self._has_started = True
                self._queue = queue.SimpleQueue()
                # The thread must not keep its owner alive, so it knows only the queue.
                stop = functools.partial(self._queue.put, None)
                run_in_background(functools.partial(_run, self._queue), stop, "moepass-read-ahead")
                weakref.finalize(self, stop)
        self._queue.put(sources)


def _run(announcements: queue.SimpleQueue[Sequence[FileSource] | None]) -> None:
    while (sources := announcements.get()) is not None:
        if not announcements.empty():
            continue
        for source in sources:
            # Advice only: a file that cannot be read says so to those who read it.
            with contextlib.suppress(OSError):
                source.announce()
        del sources
