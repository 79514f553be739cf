"""How much may wait in a server before it takes nothing more."""

from __future__ import annotations

import dataclasses
import math

from moepass.runtime.serving.requests.backend import QueueFullError


@dataclasses.dataclass(frozen=True)
class FrontendLimits:
    """How much may wait: seconds that the ranks need for what none of them has yet, and bytes of the tokens of all
    requests that are open.
    """

    waiting_seconds: float = math.inf
    open_bytes: float = math.inf

    def check(self, waiting_seconds: float, open_bytes: float) -> None:
        """Raises QueueFullError where so much waits already that nothing is taken."""
        for name, value, limit in (
            ("seconds of work", waiting_seconds, self.waiting_seconds),
            ("bytes", open_bytes, self.open_bytes),
        ):
            if value >= limit:
                raise QueueFullError(
                    f"{value:.3g} {name} wait already; the limit is {limit:.3g}",
                    retry_after_seconds=max(1.0, math.ceil(waiting_seconds)),
                    name=name,
                    value=value,
                    expected=limit,
                )
