"""Threads that work in the background, and end before the interpreter does.

A daemon thread that is still there when the interpreter is taken down is ended in the middle of what it does. Where it
happens to give a tensor back just then, the whole process aborts, at the end of a run in which all went well.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

# [Empirical] A slice of a copy takes a millisecond or two; a thread that waits for another rank ends later than this.
_PATIENCE_SECONDS = 5.0

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
# What threads held that were ended with the process: a thread drops its last references after it has been joined.
_kept: list[tuple[threading.Thread, Callable[[], object]]] = []


def run_in_background(run: Callable[[], object], stop: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that runs `run`. `stop` makes it return soon; it is called when the process ends."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    # In a forked child the threads of the parent count as ended.
    _kept.extend((thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive())
    for _, stop in _kept:
        stop()
    for thread, _ in _kept:
        thread.join(_PATIENCE_SECONDS)
