"""The interface between a ring and the homes of its banks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import Piece
from moepass.runtime.transfer.sources import MemorySource, Source
from moepass.runtime.transfer.transports import Transport


class Home:
    """The memory or files in which the banks of a model rest while they are not in a slot.

    This class is home `host`: complete banks in memory of this process. Other homes are subclasses.

    Attributes:
        transport: Moves the bytes into slots.
        staging_bytes: Bytes of this rank's staging buffers on the compute device.
        needs_host: Whether the host takes part in every copy: it reads a file, or looks up where the bytes are.
    """

    transport: Transport = Transport("host")
    staging_bytes: int = 0
    needs_host: bool = False

    def check(self) -> None:
        """Raise an error if banks can no longer be read. Called before every run, so it must be cheap."""

    def copying(self, bank: BankSpec) -> None:
        """Prepare for the banks that usually follow: a copy of `bank` starts now. Must return at once."""

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """Return the sources of `bank`, in the order in which a copy reads them; `shards` are inputs of the graph."""
        return tuple(MemorySource(shard, (Piece(0, 0, bank.format.link_bytes),)) for shard in shards)

    def rank_of(self, bank: BankSpec) -> int:
        """Return the rank of this process among the ranks that have shards of `bank`."""
        return 0
