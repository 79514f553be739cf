"""Clients that open a connection and do not say what they want: after a while they are cut off.

uvicorn closes a connection that has nothing to say after an answer, and waits without end for one that says a byte now
and then. Bodies are waited for by the application, which can answer.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# Between a connection, or an answer on it, and the end of the next request's head, at least; twice as long at most.
HEAD_SECONDS = 20.0


class PatientProtocol(H11Protocol):
    """One timer for a connection, which costs a request nothing."""

    def __init__(self, *given: Any, head_seconds: float = HEAD_SECONDS, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_seconds = head_seconds
        self._idle_behind: object = None
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look = self.loop.call_later(self._head_seconds, self._look_again)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._idle_behind is self.cycle:
            self.transport.close()
            return
        # An answer that is under way is nothing to be idle behind.
        self._idle_behind = self.cycle if is_idle else self
        self._look = self.loop.call_later(self._head_seconds, self._look_again)


def patient_protocol(head_seconds: float) -> Any:
    """What uvicorn makes the protocol of each connection with."""
    return functools.partial(PatientProtocol, head_seconds=head_seconds)
