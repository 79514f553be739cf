"""A step of a rank without work: with transport `collective`, other ranks need its shards even so."""

from __future__ import annotations

from torch import nn

from moepass.models.errors import InputError
from moepass.passes.ir.plan import BankSpec
from moepass.runtime.banks.banked_modules import banked_parameters
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.execute.adoption import adopted_parts
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.transfer.transports import Transport


def gather_only_step(model: nn.Module) -> None:
    """Take part in the gathers of one forward of `model` on the other ranks: compute nothing, receive nothing.

    `model` is one that was offloaded or loaded with transport "collective", or one that runs with expert parallelism
    and was compiled with that transport, compiled or not. The latter has run once, as on all ranks.

    The banks come in the order of this rank's last forward; before its first, in the order of the model's layers. It
    returns when all ranks have gathered them all. With other transports nobody waits for this rank: it does nothing.

    Where layers share a bank its place in the order depends on how the model runs: let all ranks run it alike, in eager
    mode or compiled, in the last forward before.

    Raises InputError where `model` has no banks; where all ranks agree on each of its runs, because it is compiled with
    all_to_all_below, or ranks add up the results of its experts (all_reduce); and where layers share a bank and the
    order is not known: before this rank's first forward, and after one that ran in parts (graph breaks). After this
    error the group is still usable: the others keep waiting, and this rank can run a forward instead. Raises PeerError
    as a forward does.
    """
    parts = adopted_parts(model) + _offloaded_parts(model)
    if not parts:
        raise InputError(
            f"{type(model).__name__} has no expert banks: call offload_experts or load_pretrained, or, where it runs "
            "with expert parallelism, run it once, compiled with backend='asyncep'"
        )
    for transport, banks in parts:
        if isinstance(transport, CollectiveTransport):
            transport.join(banks)


def _offloaded_parts(model: nn.Module) -> list[tuple[Transport, list[BankSpec]]]:
    """As `adopted_parts`; a bank comes once for each place in the model that reads it."""
    found: dict[BankStore, list[BankSpec]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for _, banked in banked_parameters(module):
            found.setdefault(banked.store, []).append(banked.store.bank(banked.bank).spec)
            break
    return [(store.home.transport, banks) for store, banks in found.items()]
