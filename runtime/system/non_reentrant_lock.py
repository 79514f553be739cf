"""A lock that raises an error in a thread that would wait for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from moepass.models.errors import InputError


class NonReentrantLock:
    """A lock between threads. `busy` is the error message for a thread that takes a lock that it already has."""

    def __init__(self, busy: str) -> None:
        self._busy = busy
        # Reentrant, so that `check` can raise an error in a thread that has the lock already.
        self._lock = threading.RLock()
        self._owner: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock in a block, as its owner. Raises InputError if this thread is the owner already."""
        with self.pause():
            self.check()
            try:
                # A signal handler may take and return the lock before this line, and after the last one.
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the lock in a block, without becoming its owner: no other thread can take it."""
        with self._lock:
            yield

    def check(self) -> None:
        """Raise InputError if this thread is the owner. Call it inside `pause`."""
        if self._owner is not None:
            raise InputError(self._busy)
