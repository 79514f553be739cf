"""Background threads that end before the interpreter does.

The interpreter kills daemon threads that still run when it exits. If one of them frees a tensor at that moment, the
whole process aborts, after a run without errors.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

# [Empirical] A slice of a copy takes a millisecond or two. A thread that waits for another rank may take longer.
_JOIN_TIMEOUT_S = 5.0

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()
# Keeps the objects of threads that end with the process: a thread drops its last references after its join.
_ending: list[tuple[threading.Thread, Callable[[], object]]] = []


def run_in_background(run: Callable[[], object], stop: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that runs `run`. `stop` makes it return soon; it is called when the process ends."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    # In a forked child the threads of the parent count as ended.
    _ending.extend((thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive())
    for _, stop in _ending:
        stop()
    for thread, _ in _ending:
        thread.join(_JOIN_TIMEOUT_S)
