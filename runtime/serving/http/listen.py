"""The application on a socket, and how it ends."""

from __future__ import annotations

from types import FrameType

import uvicorn

from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.http.patience import DEFAULT_LIMITS, ConnectionLimits, limited_protocol
from moepass.runtime.serving.routes.service import Service


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
        http=limited_protocol(limits),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    return DrainingServer(config)
