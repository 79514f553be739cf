"""Learned order of banks. With it a ring can fill slots at the end of one run for the next run."""

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
    """A bank and the sources from which it is copied."""

    bank: BankSpec
    sources: tuple[Source, ...]

    def contents(self) -> Hashable:
        """Return a value that is equal for two fetches only if they bring the same bytes; None if that is unknown."""
        contents = tuple(source.contents() for source in self.sources)
        return None if None in contents else (self.bank, contents)


class LearnedOrder(Generic[_Key, _Value]):
    """The last follower of each key.

    In a ring, a key names a graph and the bank that it begins with, so a graph of several layers has one key for each;
    the value lists the fetches into slots that are free when the run begins. In homes, keys and values are banks.
    """

    def __init__(self) -> None:
        self._followers: dict[_Key, _Value] = {}
        self._last: _Key | None = None

    def learn(self, key: _Key, value: _Value) -> None:
        """Record that `key` (with `value`) followed the previous key."""
        if self._last is not None:
            self._followers[self._last] = value
        self._last = key

    def next(self) -> _Value | None:
        """Return the value that followed the last key the last time; None if unknown."""
        return None if self._last is None else self._followers.get(self._last)

    def after(self, key: _Key, default: _Value) -> _Value:
        """Return the value that followed `key` the last time; `default` if unknown."""
        return self._followers.get(key, default)

    def forget_last(self) -> None:
        """Forget the last key, because its run was aborted."""
        self._last = None
