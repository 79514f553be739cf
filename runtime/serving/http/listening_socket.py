"""The listening socket. This module imports nothing heavy, so that a bad address is refused before models load."""

from __future__ import annotations

import socket

from moepass.models.errors import OptionError

_WAITING_CONNECTIONS = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`, 0 for a free one. Raises OptionError if that is impossible."""
    if not 0 <= port < 1 << 16:
        raise OptionError.wrong("port", port, "0 to 65535")
    try:
        # asyncio sets TCP_NODELAY only if the socket's protocol is IPPROTO_TCP.
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
        text = (
            f"the server cannot listen on {host[:100]} port {port}: {getattr(error, 'strerror', None) or error}; use "
            "another --port, or --host 127.0.0.1"
        )
        raise OptionError(text, name="host", value=(host, port)) from error
    return opened
