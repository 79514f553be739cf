"""A copy thread of an emulated CUDA: it works in the test's thread, at submission or when its result is waited for."""

from __future__ import annotations

import random
from collections import deque

from moepass.runtime.transfer.copying import CopyThread, SlotCopy, carry_out
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.link import Link


class LateThread(CopyThread):
    def __init__(self, random: random.Random) -> None:
        self.link = Link()
        self._random = random
        self._queue: deque[SlotCopy] = deque()

    def another(self) -> LateThread:
        return LateThread(self._random)

    def submit(self, copy: SlotCopy) -> SlotCopy:
        copy.finished = _Finished(self)
        self._queue.append(copy)
        for _ in range(self._random.choice((0, 1, 1, 2))):
            self.work()
        return copy

    def work(self) -> None:
        """Perform the copy that was submitted first."""
        if self._queue:
            carry_out(self._queue.popleft(), self.link)


class LateTransport(Transport):
    """A transport of one-sided copies that a `LateThread` issues."""

    def __init__(self, random: random.Random) -> None:
        super().__init__("host")
        self._random = random

    def copy_thread(self, link: Link) -> LateThread:
        return LateThread(self._random)


class _Finished:
    """A replacement for `threading.Event` that works while it waits."""

    def __init__(self, thread: LateThread) -> None:
        self._thread = thread
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        while not self._is_set:
            self._thread.work()
        return True
