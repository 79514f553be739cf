"""A time limit for templates, which come with checkpoints: one that loops ends with an error, and not the server."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moepass.models.errors import InputError

# Templates in use take less than a millisecond. [Empirical]
RENDER_SECONDS = 5.0


class RenderTimeoutError(InputError):
    """A template has not ended within its `expected` seconds."""

    def __init__(self) -> None:
        super().__init__(
            f"the chat template has not ended after {RENDER_SECONDS:g} s; it loops, or these messages make it",
            name="chat_template",
            expected=RENDER_SECONDS,
        )


class _Expired(BaseException):
    """Raised within the code that takes too long; no handler of a template's own catches it."""


@contextmanager
def render_limit(seconds: float = RENDER_SECONDS) -> Iterator[None]:
    """The block, pure Python, is left with RenderTimeoutError where it takes longer than `seconds`."""
    lock, is_done, thread = threading.Lock(), False, threading.get_ident()

    def expire() -> None:
        with lock:
            if not is_done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                is_done = True
            timer.cancel()
    except _Expired:
        raise RenderTimeoutError from None
