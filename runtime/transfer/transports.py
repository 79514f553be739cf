"""Transports move the bytes of a bank from its home into a slot; they differ in how often ranks must meet for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HomeRecord
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.runtime.transfer.copy_lane import CopyLane, IssuedCopy
from moepass.runtime.transfer.copying import CopyThread, PendingCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import Source, read_range


class Transport:
    """One-sided copies, from memory that this process can read: it needs no other rank, and none needs it.

    `is_one_sided` is False where all ranks take part in each transfer: then none may be started on a guess.
    """

    is_one_sided = True

    def __init__(self, name: str) -> None:
        """`name` is `host` or one of those of a home's record, for reports."""
        self.name = name

    def copy_thread(self, link: Link) -> CopyThread:
        """The thread that performs the copies of a ring with that link."""
        return CopyThread(link)

    def copy(self, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor) -> PendingCopy:
        """A copy of the complete `bank` into `slot`, to be submitted to `copy_thread`."""
        return PendingCopy(sources, slot, bank.name)

    def issued_copy(
        self, bank: BankSpec, sources: Sequence[Source], slot: torch.Tensor, lane: CopyLane, after: object
    ) -> IssuedCopy:
        """As `copy`, into a slot on a GPU: `copy_thread` issues it to the stream of `lane`, behind `after`."""
        return IssuedCopy(sources, slot, bank.name, lane, after)

    def read(
        self, bank: BankSpec, sources: Sequence[Source], start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        """Bytes [start, stop) of `bank`, in fresh memory on `device`; synchronous."""
        return read_range(sources, start, stop, device)

    def forget(self, bank: BankSpec) -> None:
        """`bank` is gone; nobody will ask for it again."""

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """A run by `plan` begins: what is copied until `end_run` belongs to it. Raises where nothing can be copied."""

    def end_run(self) -> None:
        """The run ended as it should."""

    def fail(self, reason: str) -> None:
        """A run ended in the middle. On return no copy waits for another rank."""


def check_transport(transport: object, home: HomeRecord) -> None:
    """Raises OptionError if `home` has no such transport."""
    if not isinstance(transport, str) or transport not in home.transports:
        raise OptionError.wrong("transport", transport, f"one of {one_of(home.transports)}")
