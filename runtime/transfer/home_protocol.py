"""The interface between a ring, the homes of its banks, and the transports that move their bytes into slots.

Transports differ in how often ranks must rendezvous for a bank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HomeRecord
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.passes.ir.shards import Piece
from moepass.runtime.transfer.copying import COPY_BYTES, Action, CopyThread
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, Source, read_range


class Transport:
    """One-sided copies from memory that this process can read, without help of other ranks. `name` is for reports."""

    # False if all ranks take part in each transfer; then no transfer may be started on a guess.
    is_one_sided = True

    def __init__(self, name: str) -> None:
        self.name = name

    def copy_thread(self, link: Link) -> CopyThread:
        """Return the thread that performs the copies of a ring with that link."""
        return CopyThread(link)

    def action(self, bank: BankSpec, sources: Sequence[Source]) -> Action:
        """Return the action that fills a slot with `bank`."""
        return COPY_BYTES

    def read(
        self, bank: BankSpec, sources: Sequence[Source], start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        """Return a copy of bytes [start, stop) of `bank`, in new memory on `device`. Waits for the copy."""
        return read_range(sources, start, stop, device)

    def forget(self, bank: BankSpec) -> None:
        """Drop all references to `bank`, which was deleted."""

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """Begin a run by `plan`; all copies until `end_run` belong to it. Raises an error if no bank can be copied."""

    def end_run(self) -> None:
        """End the run after its last operation."""

    def fail(self, reason: str) -> None:
        """Abort the run because of `reason`. On return no copy waits for another rank."""


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


def check_transport(transport: object, home: HomeRecord) -> None:
    """Raise OptionError if `home` has no such transport."""
    if not isinstance(transport, str) or transport not in home.transports:
        raise OptionError.wrong("transport", transport, f"one of {one_of(home.transports)}")
