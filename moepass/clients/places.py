"""Places of which there are only so many: requests that are open at once, bytes of the lines that are held."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator


class Places:
    """`most` places, given in the order in which they are asked for. What needs more than all of them gets them alone.

    Where a server refuses some requests, there are only as many places as it took; one more with each round of answers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()
        self.taken = 0

    @property
    def allowed(self) -> int:
        return int(self._allowed)

    @contextlib.asynccontextmanager
    async def take(self, count: int = 1) -> AsyncIterator[None]:
        """Have `count` places for as long as this is entered."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._wake()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._waiting = collections.deque(one for one in self._waiting if one[1] is not turn)
            else:
                self.taken -= count
            self._wake()

    def refused(self) -> None:
        """One that has a place was refused."""
        self._allowed = max(1.0, min(self._allowed, self.taken - 1.0))

    def answered(self) -> None:
        self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)

    def _wake(self) -> None:
        while self._waiting and (self.taken + self._waiting[0][0] <= self.allowed or not self.taken):
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += count
                turn.set_result(None)
