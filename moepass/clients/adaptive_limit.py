"""A limit on a quantity that tasks use together, such as open requests or bytes in memory."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator


class AdaptiveLimit:
    """A semaphore with `most` units, which are granted in the order of the requests for them.

    A request for more than `most` units is granted when no other units are in use.

    If a server refuses requests, the limit falls to the number that it accepted. It grows by one unit with each round
    of answers.

    Attributes:
        used: the units in use.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()
        self.used = 0

    @property
    def allowed(self) -> int:
        """The present limit."""
        return int(self._allowed)

    @contextlib.asynccontextmanager
    async def acquire(self, count: int = 1) -> AsyncIterator[None]:
        """Use `count` units in the block."""
        grant = asyncio.get_running_loop().create_future()
        self._waiting.append((count, grant))
        self._grant()
        try:
            await grant
            yield
        finally:
            if grant.cancelled():
                self._waiting = collections.deque(waiting for waiting in self._waiting if waiting[1] is not grant)
            else:
                self.used -= count
            self._grant()

    def refused(self) -> None:
        """Lower the limit, because a request was refused."""
        self._allowed = max(1.0, min(self._allowed, self.used - 1.0))

    def answered(self) -> None:
        """Raise the limit, because a request was answered."""
        self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)

    def _grant(self) -> None:
        while self._waiting and (self.used + self._waiting[0][0] <= self.allowed or not self.used):
            count, grant = self._waiting.popleft()
            if not grant.done():
                self.used += count
                grant.set_result(None)
