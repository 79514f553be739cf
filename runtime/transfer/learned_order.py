"""What comes next, learned from what came before: which banks follow each other, and which a run begins with, so that
slots fill across the boundary of two runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

from moepass.passes.ir.plan import BankSpec
from moepass.runtime.transfer.sources import Source

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A bank, and where it is copied from."""

    bank: BankSpec
    sources: tuple[Source, ...]

    def contents(self) -> Hashable:
        """Equal for two fetches only if they bring the same bytes; None where that cannot be told."""
        contents = tuple(source.contents() for source in self.sources)
        return None if None in contents else (self.bank, contents)


class LearnedOrder(Generic[_Key, _Value]):
    """What came after each key the last time.

    Of a ring, a key names a graph and the bank that it begins with, so a graph that serves several layers has one key
    for each; the value is what the run fetches into slots that it finds free. Of homes, both are banks.
    """

    def __init__(self) -> None:
        self._followers: dict[_Key, _Value] = {}
        self._last: _Key | None = None

    def learn(self, key: _Key, value: _Value) -> None:
        """`key` comes now, with `value`, after what came last."""
        if self._last is not None:
            self._followers[self._last] = value
        self._last = key

    def next(self) -> _Value | None:
        """What comes after the last key, if the past repeats itself; None where that has no past."""
        return None if self._last is None else self._followers.get(self._last)

    def after(self, key: _Key, default: _Value) -> _Value:
        """What comes after `key`; `default` where that has no past."""
        return self._followers.get(key, default)

    def forget_last(self) -> None:
        """What came last did not end, so what comes now does not follow it."""
        self._last = None
