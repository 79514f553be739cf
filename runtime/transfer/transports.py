"""Transports move the bytes of a bank from its home into a slot; they differ in how often ranks must meet for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moepass.models.errors import OptionError, one_of
from moepass.models.homes import HomeRecord
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.runtime.transfer.copying import COPY_BYTES, Action, CopyThread, SlotCopy
from moepass.runtime.transfer.lanes import HOST_LANE, Lane
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import Source, read_range


class Transport:
    """One-sided copies from memory that this process can read, without the help of other ranks.

    Attributes:
        name: `host`, or a transport of a home's record; used in reports.
        is_one_sided: False if all ranks take part in each transfer; then no transfer may be started on a guess.
    """

    is_one_sided = True

    def __init__(self, name: str) -> None:
        self.name = name

    def copy_thread(self, link: Link) -> CopyThread:
        """Return the thread that performs the copies of a ring with that link."""
        return CopyThread(link)

    def copy(
        self,
        bank: BankSpec,
        sources: Sequence[Source],
        slot: torch.Tensor,
        lane: Lane = HOST_LANE,
        after: object = None,
    ) -> SlotCopy:
        """Return a copy of the complete `bank` into `slot` on `lane`, for `copy_thread`; it begins after `after`."""
        return SlotCopy(sources, slot, bank.name, self.action(bank, sources), lane, after)

    def action(self, bank: BankSpec, sources: Sequence[Source]) -> Action:
        """Return the action that fills a slot with `bank`."""
        return COPY_BYTES

    def read(
        self, bank: BankSpec, sources: Sequence[Source], start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        """Return bytes [start, stop) of `bank`, in new memory on `device`; synchronous."""
        return read_range(sources, start, stop, device)

    def forget(self, bank: BankSpec) -> None:
        """Drop all references to `bank`, which was deleted."""

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """Begin a run by `plan`; all copies until `end_run` belong to it. Raises an error if no bank can be copied."""

    def end_run(self) -> None:
        """End the run after its last operation."""

    def fail(self, reason: str) -> None:
        """Abort the run because of `reason`. On return no copy waits for another rank."""


def check_transport(transport: object, home: HomeRecord) -> None:
    """Raise OptionError if `home` has no such transport."""
    if not isinstance(transport, str) or transport not in home.transports:
        raise OptionError.wrong("transport", transport, f"one of {one_of(home.transports)}")
