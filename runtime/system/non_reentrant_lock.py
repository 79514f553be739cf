"""Taking turns: threads wait for each other, and a thread that would wait for itself gets an error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from moepass.models.errors import InputError


class NonReentrantLock:
    """One turn at a time, of all threads of a process."""

    def __init__(self, busy: str) -> None:
        """`busy` is what a thread is told that asks for a turn inside its own."""
        self._busy = busy
        # Reentrant, so that a thread finds out that it has the turn already.
        self._lock = threading.RLock()
        self._owner: int | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """A turn, once no other thread has it. Raises InputError where this thread has it already."""
        with self.pause():
            self.check()
            try:
                # A signal handler may take a turn of its own before this line, and after the last one.
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the lock without starting a turn."""
        with self._lock:
            yield

    def check(self) -> None:
        """Inside `pause`: raises InputError where this is a turn of this thread."""
        if self._owner is not None:
            raise InputError(self._busy)
