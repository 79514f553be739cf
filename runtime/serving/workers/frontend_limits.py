"""Limits on the work that may wait in a server."""

from __future__ import annotations

import dataclasses
import math

from moepass.runtime.serving.requests.backend import QueueFullError


@dataclasses.dataclass(frozen=True)
class FrontendLimits:
    """Limits above which new requests are refused.

    Attributes:
        waiting_seconds: Seconds that the ranks need for the requests that are not assigned yet.
        open_bytes: Bytes of the tokens of all open requests.
    """

    waiting_seconds: float = math.inf
    open_bytes: float = math.inf

    def check(self, waiting_seconds: float, open_bytes: float) -> None:
        """Raise QueueFullError if the waiting work reaches a limit."""
        for name, value, limit in (
            ("seconds of work", waiting_seconds, self.waiting_seconds),
            ("bytes", open_bytes, self.open_bytes),
        ):
            if value >= limit:
                raise QueueFullError(
                    f"the queue is full: {value:.3g} {name} are waiting, and the limit is {limit:.3g}; try again later",
                    retry_after_seconds=max(1.0, math.ceil(waiting_seconds)),
                    name=name,
                    value=value,
                    expected=limit,
                )
