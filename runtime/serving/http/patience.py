"""Clients that take a connection and do nothing with it: after a while they are cut off, and there are only so many.

uvicorn closes a connection that has nothing to say after an answer, and waits without end for one that says a byte now
and then, or does not read its answer. Bodies are waited for by the application, which can answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from moepass.models.limits import MOST_CONNECTIONS
from moepass.runtime.serving.requests.backend import NotServingError
from moepass.runtime.serving.routes.errors import response_of

# What a refused client sends is read for so long: a connection that is closed with something unread is reset, and then
# the client may never see the refusal.
_REFUSAL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take.

    most            connections that are open at once, of all clients
    head_seconds    between a connection, or an answer on it, and the end of the next request's head, at least; twice as
                    long at most
    read_seconds    from an answer until it is read, at least; twice `head_seconds` longer at most
    """

    most: int = MOST_CONNECTIONS
    head_seconds: float = 20.0
    read_seconds: float = 60.0


DEFAULT_LIMITS = ConnectionLimits()


class LimitedProtocol(H11Protocol):
    """One timer for a connection, which costs a request nothing."""

    def __init__(self, *given: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*given, **named)
        self._limits = limits
        self._idle_behind: object = None
        self._unread: tuple[object, float] | None = None
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.most:
            refused = RefusedConnection(self._limits.most)
            transport.set_protocol(refused)
            refused.connection_made(transport)
            return
        super().connection_made(transport)
        self._look = self.loop.call_later(self._limits.head_seconds, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        if self._leaves_its_answer():
            self.transport.abort()  # closing would wait until it is read
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._idle_behind is self.cycle:
            self.transport.close()
        # An answer that is under way is nothing to be idle behind.
        self._idle_behind = self.cycle if is_idle else self
        self._look = self.loop.call_later(self._limits.head_seconds, self._look_again)

    def _leaves_its_answer(self) -> bool:
        """Whether a part of one answer has been left unread for too long."""
        if not self.transport.get_write_buffer_size():
            self._unread = None
        elif self._unread is None or self._unread[0] is not self.cycle:
            self._unread = self.cycle, self.loop.time()
        else:
            return self.loop.time() - self._unread[1] >= self._limits.read_seconds
        return False


class RefusedConnection(asyncio.Protocol):
    """One too many: it is told so, whatever it asks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        text = f"{self._most} connections are open, which is the limit; use fewer, or come back later"
        response = response_of(NotServingError(text, value=self._most, expected=self._most))
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + bytes(response.body))
        transport.write_eof()
        self._end = asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()


def limited_protocol(limits: ConnectionLimits) -> Any:
    """What uvicorn makes the protocol of each connection with."""
    return functools.partial(LimitedProtocol, limits=limits)
