"""Run a ring without a graph, as the executor does with the simplest schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from moepass.passes.ir.plan import GatherSignature
from moepass.runtime.banks.banks import Bank, pack_bank
from moepass.runtime.transfer.ring import Ring

SLOT_BYTES = 1 << 10


def small_bank(index: int) -> Bank:
    """Return a bank of at most SLOT_BYTES, whose values identify it."""
    tensors = {"up": torch.full((2, 50), index + 1.0), "down": torch.full((2, 3), -index - 1.0)}
    return pack_bank(index, f"layers.{index}", tensors, home="host")


def holds(tensors: tuple[torch.Tensor, ...], bank: Bank) -> bool:
    """Return True if `tensors` are those of `bank`."""
    return all(map(torch.equal, tensors, bank.views(bank.shard)))


def run_banks(
    ring: Ring,
    graph: Hashable,
    banks: list[Bank],
    slots: int,
    read: Callable[[tuple[torch.Tensor, ...], Bank], object],
) -> None:
    """Run `banks` in order through `slots` slots, and call `read` with the tensors of each acquired bank."""
    slots = min(slots, len(banks))
    with ring.run(graph, GatherSignature(slots=slots)):
        filled = [ring.prefetch([bank.shard], bank.spec, slot, None) for slot, bank in enumerate(banks[:slots])]
        for number, bank in enumerate(banks):
            slot = number % slots
            read(ring.acquire(filled[number], bank.spec, slot), bank)
            refill = number + slots
            done = ring.release(slot, last=refill >= len(banks))
            if refill < len(banks):
                filled.append(ring.prefetch([banks[refill].shard], banks[refill].spec, slot, done))
