"""A thread that announces files to the kernel, so that a disk reads the next bank during the copy of this one."""

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
    """A thread that announces sources, the latest first; older ones that are still waiting are skipped.

    Announcing takes time: the kernel allocates memory for every page, and blocks if the
    disk is busy. On platforms without these calls nothing is announced.
    """

    _queue: queue.SimpleQueue[Sequence[FileSource] | None]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_started = False

    def announce(self, sources: Sequence[FileSource]) -> None:
        """Queue `sources`; returns at once."""
        if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
            return
        with self._lock:
            if not self._has_started:
                self._has_started = True
                self._queue = queue.SimpleQueue()
                # The thread references only the queue, so that it does not keep its owner alive.
                stop = functools.partial(self._queue.put, None)
                run_in_background(functools.partial(_run, self._queue), stop, "moepass-read-ahead")
                weakref.finalize(self, stop)
        self._queue.put(sources)


def _run(announcements: queue.SimpleQueue[Sequence[FileSource] | None]) -> None:
    while (sources := announcements.get()) is not None:
        if not announcements.empty():
            continue
        for source in sources:
            # Announcing is advice. A later read of the file reports the error.
            with contextlib.suppress(OSError):
                source.announce()
        del sources
