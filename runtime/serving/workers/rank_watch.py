"""Whether ranks still work: one that stands still says nothing, and one that is caught in a step says for how long.

A rank's socket has a thread of its own, which says `Alive` every half second whatever the rank computes. So there are
two signs of a rank that hangs, and both are measured against what may take long:

    silence     no message at all for `silent_seconds`: the process is stopped, or nothing in it runs
    one step    it computes for longer than `patience` times what its FLOPs predict at the rate that the rank reaches,
                but never for less than `step_seconds`: it waits for something that does not come

Pure: whoever asks brings the time. Ranks that still start are not watched here: compiling has no predicted time. The
supervisor knows how long it took before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moepass.models.errors import OptionError
from moepass.runtime.serving.engine.step_engine import EngineFacts

# How often a rank says that it lives, and how often somebody looks whether it did.
ALIVE_SECONDS = 0.5
LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class HangLimits:
    """[Empirical] Silence of ten seconds is twenty messages that did not come. A step is as slow as that when the rest
    of the machine is busy, memory is swapped, or it had to be split; a request of the default timeout of 60 seconds
    still runs elsewhere after `step_seconds`.

    Raises OptionError for limits that are not above 0.
    """

    silent_seconds: float = 10.0
    step_seconds: float = 30.0
    patience: float = 20.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise OptionError.wrong(field.name, getattr(self, field.name), "above 0")


@dataclasses.dataclass
class _WatchedRank:
    heard: float
    given: dict[str, int] = dataclasses.field(default_factory=dict)
    step_flops: int = 0
    busy_seconds: float = 0.0


class RankWatch:
    """What ranks were given, and when they were heard last. Times are seconds of one clock."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks: dict[int, _WatchedRank] = {}
        self._looked: float | None = None

    def begin(self, rank: int, now: float) -> None:
        """It is ready; from now on it is watched."""
        self._ranks[rank] = _WatchedRank(now)

    def forget(self, rank: int) -> None:
        """It is gone."""
        self._ranks.pop(rank, None)

    def given(self, rank: int, number: str, flops: int) -> None:
        """It will compute the assignment `number`, which takes `flops`."""
        if rank in self._ranks:
            self._ranks[rank].given[number] = flops

    def heard(self, rank: int, now: float, busy_seconds: float | None = None) -> None:
        """It said something: for how long it computes, or (None) that it came to something new."""
        watched = self._ranks.get(rank)
        if watched is not None:
            watched.heard = now
            watched.busy_seconds = busy_seconds or 0.0

    def started(self, rank: int, numbers: tuple[str, ...]) -> None:
        """A step with these assignments begins. Ranks keep the order of what they are given, so that what they have
        passed over was cancelled."""
        watched = self._ranks.get(rank)
        if watched is None:
            return
        missing = set(numbers) & watched.given.keys()
        watched.step_flops = sum(watched.given[number] for number in missing)
        while missing:
            number = next(iter(watched.given))
            del watched.given[number]
            missing.discard(number)

    def hung(self, now: float, facts: Mapping[int, EngineFacts]) -> dict[int, str]:
        """The watched ranks that hang, with the reason; `facts` of all of them.

        To be asked every LOOK_SECONDS. What passes beyond that is the caller's own pause, in which it heard nobody.
        """
        pause = 0.0 if self._looked is None else max(0.0, now - self._looked - LOOK_SECONDS)
        self._looked = now
        found = {}
        for rank, watched in self._ranks.items():
            watched.heard += pause
            silent = now - watched.heard
            # A step of few tokens waits for transfers as long as a full one.
            flops = max(facts[rank].saturation_flops, watched.step_flops)
            predicted = flops / facts[rank].flops_per_second
            limit = max(self._limits.step_seconds, self._limits.patience * predicted)
            if silent > self._limits.silent_seconds:
                found[rank] = f"it has said nothing for {silent:.1f} seconds"
            elif watched.busy_seconds > limit:
                found[rank] = (
                    f"it has computed for {watched.busy_seconds:.1f} seconds, where {predicted:.2g} are predicted and "
                    f"{limit:.1f} are the limit"
                )
        return found
