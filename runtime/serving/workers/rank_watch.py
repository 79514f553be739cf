"""Detection of ranks that hang, from the time since their last message and the duration of their step.

The thread that owns a rank's socket sends `Alive` every half second, also during a step. Two signs show that a rank
hangs:

    silence     no message at all for `silent_seconds`: the process is stopped, or none of its threads runs
    long step   the step has run longer than `patience` times the duration that its FLOPs predict, and longer than
                `step_seconds`: it waits for something that does not happen

The watch reads no clock; callers pass the time. It does not watch ranks that are starting, because compilation has no
predicted duration. The supervisor compares their start with earlier starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.runtime.serving.engine.step_engine import EngineFacts

# Interval of a rank's `Alive` messages, and interval of the checks for hung ranks.
ALIVE_SECONDS = 0.5
CHECK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class HangLimits:
    """Limits after which a rank counts as hung.

    [Empirical] Ten seconds of silence are twenty missing messages. A healthy step can be `patience` times slower than
    predicted if the machine is busy, memory is swapped, or the step was split. After `step_seconds`, a request with the
    default timeout of 60 seconds can still run on another rank.
    """

    silent_seconds: float = 10.0
    step_seconds: float = 30.0
    patience: float = 20.0


@dataclasses.dataclass
class _WatchedRank:
    last_message: float
    assigned_flops: dict[str, int] = dataclasses.field(default_factory=dict)
    step_flops: int = 0
    busy_seconds: float = 0.0


class RankWatch:
    """Records each rank's assignments and last message. All times are seconds of one clock."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks: dict[int, _WatchedRank] = {}
        self._last_check: float | None = None

    def begin(self, rank: int, now: float) -> None:
        """Watch `rank` from now on; it is ready."""
        self._ranks[rank] = _WatchedRank(now)

    def forget(self, rank: int) -> None:
        """Stop watching `rank`; it has ended."""
        self._ranks.pop(rank, None)

    def assigned(self, rank: int, number: str, flops: int) -> None:
        """Record that `rank` will compute assignment `number`, which takes `flops`."""
        if rank in self._ranks:
            self._ranks[rank].assigned_flops[number] = flops

    def message_received(self, rank: int, now: float, busy_seconds: float | None = None) -> None:
        """Record a message from `rank`.

        `busy_seconds` is how long the rank's current step has run. Only messages of type `Alive` contain it.
        """
        watched = self._ranks.get(rank)
        if watched is not None:
            watched.last_message = now
            watched.busy_seconds = busy_seconds or 0.0

    def started(self, rank: int, numbers: tuple[str, ...]) -> None:
        """Record the start of a step. Assignments before these were cancelled, because they are computed in order."""
        watched = self._ranks.get(rank)
        if watched is None:
            return
        missing = set(numbers) & watched.assigned_flops.keys()
        watched.step_flops = sum(watched.assigned_flops[number] for number in missing)
        while missing:
            number = next(iter(watched.assigned_flops))
            del watched.assigned_flops[number]
            missing.discard(number)

    def hung(self, now: float, facts: Mapping[int, EngineFacts]) -> dict[int, str]:
        """Return the ranks that hang, with the reason of each. `facts` has the facts of all watched ranks.

        Call it every CHECK_SECONDS. A longer interval means that the caller itself was suspended and read no messages,
        so it does not count as silence.
        """
        pause = 0.0 if self._last_check is None else max(0.0, now - self._last_check - CHECK_SECONDS)
        self._last_check = now
        reasons = {}
        for rank, watched in self._ranks.items():
            watched.last_message += pause
            silent = now - watched.last_message
            # A step of few tokens waits for expert transfers as long as a full step.
            flops = max(facts[rank].saturation_flops, watched.step_flops)
            predicted = flops / facts[rank].flops_per_second
            limit = max(self._limits.step_seconds, self._limits.patience * predicted)
            if silent > self._limits.silent_seconds:
                reasons[rank] = (
                    f"no message for {silent:.1f} seconds; the limit is {self._limits.silent_seconds:.1f} seconds"
                )
            elif watched.busy_seconds > limit:
                reasons[rank] = (
                    f"its step has run for {watched.busy_seconds:.1f} seconds; {predicted:.2g} seconds are predicted, "
                    f"and the limit is {limit:.1f} seconds"
                )
        return reasons
