"""The application on a socket: where it listens, and how it ends."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from moepass.models.errors import OptionError
from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.http.patience import DEFAULT_LIMITS, ConnectionLimits, patient_protocol
from moepass.runtime.serving.routes.service import Service

_WAITING_CONNECTIONS = 2048


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT it takes no more requests and answers those that it has; the second one ends it at once.

    `run` returns after that, where uvicorn's own would end the process by the signal.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def server_of(
    service: Service, *, drain_seconds: float = 30.0, limits: ConnectionLimits = DEFAULT_LIMITS
) -> DrainingServer:
    """A server of `service`, to be run with a socket of `open_socket`; it drains for at most `drain_seconds`."""
    config = uvicorn.Config(
        create_app(service),
        http=patient_protocol(limits),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    return DrainingServer(config)


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`, of which 0 is any free one.

    Raises OptionError where that is not possible.
    """
    if not 0 <= port < 1 << 16:
        raise OptionError.wrong("port", port, "0 to 65535")
    try:
        # With its protocol, which is TCP: asyncio sends without delay on such sockets alone.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(_WAITING_CONNECTIONS)
        except OSError:
            opened.close()
            raise
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"nothing can listen at {host[:100]} port {port}: {getattr(error, 'strerror', None) or error}; give "
            "another --port, or --host 127.0.0.1",
            name="host",
            value=(host, port),
        ) from error
    return opened
