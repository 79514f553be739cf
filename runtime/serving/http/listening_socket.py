"""Where a server listens. Nothing heavy is imported here: an address that cannot be had is told at once."""

from __future__ import annotations

import socket

from moepass.models.errors import OptionError

_WAITING_CONNECTIONS = 2048


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
