"""What comes next, learned from what came before: which banks follow each other, and which a run begins with, so that
slots fill across the boundary of two runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.transfer.sources import Source


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A bank, and where it is copied from."""

    bank: BankSpec
    sources: tuple[Source, ...]

    def contents(self) -> Hashable:
        """Equal for two fetches only if they bring the same bytes; None where that cannot be told."""
        contents = tuple(source.contents() for source in self.sources)
        return None if None in contents else (self.bank, contents)


class LearnedOrder:
    """After a run with key A came a run that began with these fetches: the guess for the next time.

    A key names a graph and the bank that it begins with, so a graph that serves several layers has one key for each.
    """

    def __init__(self) -> None:
        self._beginnings: dict[Hashable, Mapping[int, Fetch]] = {}
        self._last: Hashable = None

    def learn(self, key: Hashable, beginning: Mapping[int, Fetch]) -> None:
        """A run with `key` follows the last one; `beginning` is what it fetches into slots that it finds free."""
        if self._last is not None:
            self._beginnings[self._last] = dict(beginning)
        self._last = key

    def next(self, slot: int) -> Fetch | None:
        """What the run after the current one will fetch into its slot `slot`, if the past repeats itself."""
        return self._beginnings.get(self._last, {}).get(slot)

    def forget_last(self) -> None:
        """The run did not end, so what comes now does not follow it."""
        self._last = None


class Followers:
    """Which bank is copied after which: as the last time, and before that, in the order of their indices."""

    def __init__(self) -> None:
        self._followers: dict[int, int] = {}
        self._last: int | None = None

    def learn(self, bank: int) -> None:
        """`bank` is copied now."""
        if self._last is not None:
            self._followers[self._last] = bank
        self._last = bank

    def after(self, bank: int) -> int:
        """The bank that is expected to follow; it need not exist."""
        return self._followers.get(bank, bank + 1)
