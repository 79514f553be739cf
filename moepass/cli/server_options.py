"""Options of the HTTP server, and of its frontend, which `moepass serve` and `moepass.ray_serve` share."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from moepass.models.byte_counts import parse_bytes
from moepass.models.limits import MOST_CONNECTIONS, MOST_WAIT_SECONDS
from moepass.option_records import option

_Seconds = Annotated[float, Meta(ge=0.001, le=MOST_WAIT_SECONDS)]


class FrontendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The API key and the limits of the process that answers clients."""

    api_key: Annotated[
        str | None,
        option(
            "The key that clients must send.",
            details="Every route except `/`, `/health`, `/ready` and `/ping` requires it.",
            unset="none",
            metavar="KEY",
        ),
    ] = None
    timeout: Annotated[_Seconds, option("Seconds after which an unanswered request gets 504.", metavar="SECONDS")] = (
        60.0
    )
    queue_seconds: Annotated[
        _Seconds,
        option(
            "The limit on waiting work, in seconds of computation; while it is reached, calls are refused with 429.",
            details="The header `Retry-After` says when to try again. A call is one HTTP request, which may contain "
            "several prompts; it is accepted or refused as a whole. An idle server accepts every call that its model "
            "can compute.",
            metavar="SECONDS",
        ),
    ] = 30.0
    queue_bytes: Annotated[
        str,
        option(
            "The limit on the bytes that the tokens of all open requests take; while it is reached, calls are refused "
            "with 429.",
            details="The header `Retry-After` says when to try again.",
            metavar="BYTES",
        ),
    ] = "1GB"
    drain: Annotated[
        Annotated[float, Meta(ge=0, le=MOST_WAIT_SECONDS)],
        option("Seconds that open requests have to finish after SIGTERM.", metavar="SECONDS"),
    ] = 30.0

    @property
    def open_bytes(self) -> int:
        """`queue_bytes` as a number. Raises InputError if it is not a valid number of bytes."""
        return int(parse_bytes(self.queue_bytes, "queue_bytes") or 0)


class ServerOptions(FrontendOptions, frozen=True, kw_only=True):
    """The options of `moepass serve` that are not about its ranks."""

    host: Annotated[str, option("The address to listen on.", metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], option("The port to listen on; 0 picks a free one.")] = 8000
    name: Annotated[
        tuple[str, ...],
        option(
            "A name by which clients call the model; repeat the option for more names.",
            unset="the last part of MODEL",
            metavar="NAME",
        ),
    ] = ()
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)],
        option(
            "The maximum number of open connections, over all clients; further ones are answered with 503.",
            details="The header `Retry-After` says when to try again. Each connection is an open file: if the system "
            "allows fewer, the server prints a warning when it starts.",
        ),
    ] = MOST_CONNECTIONS


def served_names(model: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names by which clients call `model`: `names`, or the last part of its path if `names` is empty."""
    return names or (os.path.basename(os.path.abspath(model)) or model,)
