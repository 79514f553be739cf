"""A time limit for chat templates: they come with checkpoints, and one that loops must not block the server."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moepass.models.errors import InputError

# Templates in use take less than a millisecond. [Empirical]
RENDER_SECONDS = 5.0


class RenderTimeoutError(InputError):
    """A template did not finish within its `expected` seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the chat template did not finish within {seconds:g} s; check it for a loop, or send shorter messages",
            name="chat_template",
            expected=seconds,
        )


class _Expired(BaseException):
    """Raised inside the code that takes too long; `except Exception` in a template does not catch it."""


class RenderLimit:
    """Interrupts blocks of pure Python that take longer than `seconds`, in any thread. One thread watches all."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}  # by thread
        self._is_watched = False

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Run the block with the time limit, and raise RenderTimeoutError if it expires."""
        thread = threading.get_ident()
        try:
            try:
                with self._lock:
                    self._deadlines[thread] = time.monotonic() + self.seconds
                    if not self._is_watched:
                        self._is_watched = True
                        threading.Thread(target=self._watch, daemon=True).start()
                yield
            finally:
                with self._lock:
                    self._deadlines.pop(thread, None)
        except _Expired:
            raise RenderTimeoutError(self.seconds) from None

    def _watch(self) -> None:
        while True:
            time.sleep(self.seconds / 4)
            with self._lock:
                if not self._deadlines:  # the next limited block starts a new thread
                    self._is_watched = False
                    return
                for thread, deadline in list(self._deadlines.items()):
                    if time.monotonic() > deadline:
                        del self._deadlines[thread]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Expired))
