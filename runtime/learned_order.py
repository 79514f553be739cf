"""Which banks a run begins with, learned from the runs before it, so that slots fill across the border of two runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import torch

from moepass.passes.ir import BankSpec


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A bank, and the shards that it is copied from."""

    bank: BankSpec
    shards: tuple[torch.Tensor, ...]

    def contents(self) -> Hashable:
        """Equal for two fetches only if they bring the same bytes; None where that cannot be told.

        In-place changes are told by torch's version counter, which inference tensors do not have.
        """
        if any(shard.is_inference() for shard in self.shards):
            return None
        return self.bank, tuple((shard.data_ptr(), shard._version) for shard in self.shards)


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
