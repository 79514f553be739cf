"""A uvicorn server that answers open requests before it shuts down."""

from __future__ import annotations

from types import FrameType

import uvicorn

from moepass.runtime.serving.http.app import create_app
from moepass.runtime.serving.http.connection_limits import DEFAULT_LIMITS, ConnectionLimits, limited_protocol
from moepass.runtime.serving.routes.service import Service


class DrainingServer(uvicorn.Server):
    """A server that stops accepting requests on SIGTERM or SIGINT, answers the open ones, and then returns from `run`.

    A second signal ends it at once. uvicorn's own server would end the process with the signal.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining, or end at once if the server drains already."""
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(
    service: Service, *, drain_seconds: float = 30.0, limits: ConnectionLimits = DEFAULT_LIMITS
) -> DrainingServer:
    """Return a server for `service`; run it with a socket of `open_socket`.

    Args:
        service: Answers the requests.
        drain_seconds: How long the server waits for open requests before it ends; at least 1.
        limits: The limits of each connection.
    """
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
