"""A step of a rank without work: with transport `collective`, other ranks still need its shards."""

from __future__ import annotations

from torch import nn

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.runtime.banks.banked_modules import banked_parameters
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.homes.adopted_banks import adopted_parts
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.transfer.home_protocol import Transport


def gather_only_step(model: nn.Module) -> None:
    """Take part in the gathers of one forward of `model` on the other ranks, without computing or receiving anything.

    The banks come in the order of this rank's last forward, or in the order of the model's layers before its first. The
    function returns when all ranks have gathered all banks. With other transports it returns at once.

    If layers share a bank, its position in the order depends on how the model runs: all ranks must have run the last
    forward the same way, in eager mode or compiled.

    Args:
        model: a model, compiled or not, that was offloaded or loaded with transport "collective"; or one with expert
            parallelism that was compiled with that transport and has run once on all ranks.

    Raises:
        InputError: `model` has no banks; or ranks agree on each of its runs, because it was compiled with
            all_to_all_below or its experts are summed over ranks (all_reduce); or layers share a bank and the order is
            unknown, before this rank's first forward or after one with graph breaks. The group stays usable: the other
            ranks keep waiting, and this rank can run a forward instead.
        PeerError: a rank is gone or does not respond, as in a forward.
    """
    parts = adopted_parts(model) + _offloaded_parts(model)
    if not parts:
        raise InputError(
            f"{type(model).__name__} has no expert banks: call offload_experts or load_pretrained first; a model with "
            "expert parallelism must first run once, compiled with backend='asyncep'"
        )
    for transport, banks in parts:
        if isinstance(transport, CollectiveTransport):
            transport.join(banks)


def _offloaded_parts(model: nn.Module) -> list[tuple[Transport, list[BankSpec]]]:
    """Return the transports and banks of an offloaded model, with a bank for each module that reads it."""
    specs: dict[BankStore, list[BankSpec]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for _, banked in banked_parameters(module):
            specs.setdefault(banked.store, []).append(banked.store.bank(banked.bank).spec)
            break
    return [(store.home.transport, banks) for store, banks in specs.items()]
