"""A uvicorn server that limits its connections, and answers open requests before it shuts down.

uvicorn closes connections that are idle after a response. It waits without limit for a client that sends a byte now and
then, or that does not read its response. The application itself limits the time for a body, because it can answer 408.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moepass.models.limits import MOST_CONNECTIONS
from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.requests.backend import NotServingError
from moepass.runtime.serving.routes.errors import response_of
from moepass.runtime.serving.routes.service import Service

# A refused connection stays open this long. Closing it with unread input would reset it, and the client might never see
# the refusal.
_REFUSAL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits on connections. At most `most` may be open at once, over all clients.

    A client must complete the head of its next request within `head_seconds` of connecting, or of its last response.
    Otherwise it is disconnected after one to two times `head_seconds`. A client may leave a response unread for
    `read_seconds`. After that it is disconnected within another two times `head_seconds`.
    """

    most: int = MOST_CONNECTIONS
    head_seconds: float = 20.0
    read_seconds: float = 60.0


class LimitedProtocol(H11Protocol):
    """An HTTP protocol of uvicorn with `ConnectionLimits`, checked by one timer per connection."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        # The request cycle after which the connection was idle at the last check.
        self._idle_after: object = None
        self._unread: tuple[object, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection and start its timer. If too many connections are open, refuse it with 503 instead."""
        most = self._limits.most
        if len(self.connections) >= most:
            transport.set_protocol(asyncio.Protocol())  # ignores the request
            text = f"{most} connections are open, which is the limit; close some, or try again later"
            response = response_of(NotServingError(text, value=most, expected=most))
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = b"".join(b"%s: %s\r\n" % header for header in headers)
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + bytes(response.body))
            transport.write_eof()
            self.loop.call_later(_REFUSAL_SECONDS, transport.abort)
            return
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._limits.head_seconds, self._check_client)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check_client(self) -> None:
        if self._is_response_unread():
            self.transport.abort()  # close() would wait until the client reads the response
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._idle_after is self.cycle:
            self.transport.close()
        # `self` matches no cycle: while a response is sent, the connection is not idle.
        self._idle_after = self.cycle if is_idle else self
        self._timer = self.loop.call_later(self._limits.head_seconds, self._check_client)

    def _is_response_unread(self) -> bool:
        """Return True if the client has left data of one response unread for `read_seconds`."""
        if not self.transport.get_write_buffer_size():
            self._unread = None
        elif self._unread is None or self._unread[0] is not self.cycle:
            self._unread = self.cycle, self.loop.time()
        else:
            return self.loop.time() - self._unread[1] >= self._limits.read_seconds
        return False


class DrainingServer(uvicorn.Server):
    """A server that stops accepting requests on SIGTERM or SIGINT, answers the open ones, and then returns from `run`.

    A second signal ends it at once. uvicorn's own server would end the process with the signal.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining, or end at once if the server drains already."""
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(
    service: Service, *, drain_seconds: float = 30.0, limits: ConnectionLimits | None = None
) -> DrainingServer:
    """Return a server for `service`. Before it ends, it waits `drain_seconds` for open requests, at least 1."""
    config = uvicorn.Config(
        create_app(service),
        http=functools.partial(LimitedProtocol, limits=limits or ConnectionLimits()),  # type: ignore[arg-type]
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    return DrainingServer(config)
