"""The interface of homes for a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import Piece
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.transports import Transport


class Home:
    """The place where a model's banks rest between two stays in a slot.

    This one is home `host`: complete banks in memory of this process, which nobody can take away.
    """

    transport: Transport = Transport("host")
    # Bytes that this rank's staging buffers take on the compute device.
    staging_bytes: int = 0
    # Whether the host takes part in every copy: to read a file, or to look whether bytes are there.
    needs_host: bool = False

    def check(self) -> None:
        """Raise where banks can no longer be read. Called before every run; must cost next to nothing."""

    def copying(self, bank: BankSpec) -> None:
        """A copy of `bank` starts now: time to get ready what usually comes next. Must return at once."""

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The sources of `bank`, in the order in which a copy takes slices; `shards` came with the graph."""
        return tuple(MemorySource(shard, (Piece(0, 0, bank.format.link_bytes),)) for shard in shards)

    def rank_of(self, bank: BankSpec) -> int:
        """This process's rank among those that have shards of `bank`."""
        return 0
