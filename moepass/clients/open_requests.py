"""How many requests may be open at once: a number of them and of their bytes, fewer where the server refuses some."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator


class OpenRequests:
    """Places for requests, given in the order in which they are asked for.

    Where a server refuses some, no more are open than it took; one more with each round of answers. A request that is
    larger than all bytes together runs alone.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._allowed = float(most)
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()
        self.count = self.bytes = 0

    @property
    def allowed(self) -> int:
        return int(self._allowed)

    @contextlib.asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """A place for a request of `size` bytes, for as long as this is entered."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._wake()
        try:
            await turn
            yield
        finally:
            if turn.cancelled():
                self._waiting = collections.deque(one for one in self._waiting if one[1] is not turn)
            else:
                self.count -= 1
                self.bytes -= size
            self._wake()

    def refused(self) -> None:
        """One that has a place was refused."""
        self._allowed = max(1.0, min(self._allowed, self.count - 1.0))

    def answered(self) -> None:
        self._allowed = min(float(self._most), self._allowed + 1 / self._allowed)

    def _wake(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self.count += 1
                self.bytes += size
                turn.set_result(None)

    def _has_room(self, size: int) -> bool:
        return self.count < self.allowed and (self.bytes + size <= self._most_bytes or not self.count)
