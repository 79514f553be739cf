"""Experts of a model that runs with expert parallelism already: what each rank holds becomes a shard for all ranks.

A graph from which expert parallelism was taken reads complete banks, of which its own parameters are this rank's part.
In its first run these parts are copied into shared memory and the ranks meet, once; from then on each pulls what it
lacks whenever it wants.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.models.errors import InputError
from moepass.passes.ir import BankSpec, Plan
from moepass.passes.protocol import Group
from moepass.runtime.banks import BankStore
from moepass.runtime.collective import make_transport
from moepass.runtime.executor import Adopt
from moepass.runtime.homes import Home
from moepass.runtime.link import Link
from moepass.runtime.peer_home import packer_for
from moepass.runtime.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.ring import Ring
from moepass.runtime.sources import Source
from moepass.runtime.transports import PULL, Transport

_MEETING = (
    "every rank of the group must run its compiled model once, and take the same blocks: one whose plan has a refusal "
    "that the others' have not stays behind"
)


def process_groups(names: Iterable[str]) -> dict[str, Group]:
    """This rank's place in each of the process groups with these names; those that do not exist here are left out."""
    known = {str(group.group_name): group for group in c10d._world.pg_map}
    return {name: Group(known[name].rank(), known[name].size()) for name in names if name in known}


@dataclasses.dataclass(frozen=True)
class AdoptionOptions:
    """How adopted banks stream: see `moepass.options.Options`."""

    slots: int = 2
    link: Link = dataclasses.field(default_factory=Link)
    timeout_s: float = DEFAULT_TIMEOUT_S
    transport: str = PULL


def adoption(plan: Plan, device: torch.device, options: AdoptionOptions, debug: bool) -> Adopt | None:
    """What completes the banks of `plan` in its first run; None where they are no parameters of the graph."""
    groups = {bank.group for bank in plan.banks if bank.group}
    if not plan.residencies or not groups:
        return None
    (name,) = groups

    def adopt(banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> tuple[Ring, list[BankSpec]]:
        adopted = adopted_banks(name, device, options)
        known = adopted.adopt(banks, parts)
        return adopted.store.ring(debug), known

    return adopt


class AdoptedHome(Home):
    """Shards on all ranks, brought together meeting by meeting; a shard that changed afterwards is an error."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.groups: list[PeerGroup] = []
        self._spread: dict[int, tuple[Source, ...]] = {}
        self._seen: dict[int, tuple[tuple[int, int], ...]] = {}

    def check(self) -> None:
        """Raises PeerError where a rank is gone."""
        for group in self.groups:
            group.check_alive()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The shards of all ranks. Raises InputError where this rank's part is not what the others were given."""
        if _versions(shards) != self._seen[bank.index]:
            raise InputError(
                f"the expert weights of {bank.name} were changed after their first compiled run, but other ranks have "
                "the old ones; load weights first, then compile"
            )
        return self._spread[bank.index]

    def add(
        self,
        group: PeerGroup,
        spread: Mapping[int, tuple[Source, ...]],
        seen: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """The outcome of a meeting: where shards lie, and the tensors of this rank that they were copied from."""
        self.groups.append(group)
        self._spread.update(spread)
        self._seen.update({index: _versions(shards) for index, shards in seen.items()})


class AdoptedBanks:
    """The adopted banks of one process group on one device, and the ring that all of them stream through."""

    def __init__(self, group: ProcessGroup, device: torch.device, options: AdoptionOptions) -> None:
        self.home = AdoptedHome(make_transport(options.transport, options.link))
        self.store = BankStore(device, options.slots, options.link, self.home)
        self.options = options
        self._group = weakref.ref(group)
        self._lock = threading.Lock()
        # By the memory of a bank's first local tensor. A reference to it, because a later model may get its address.
        self._known: dict[StorageWeakRef, BankSpec] = {}

    def adopt(self, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> list[BankSpec]:
        """The banks as this store numbers them. `parts` are this rank's tensors [experts of this rank, ...] of each.

        The first time that a bank is seen all ranks meet here. Raises PeerError where ranks are missing, gone, or bring
        other banks; SharedMemoryError where the machine has none.
        """
        with self._lock:
            memories = [StorageWeakRef(tensors[0].untyped_storage()) for tensors in parts]
            self._known = {memory: spec for memory, spec in self._known.items() if not memory.expired()}
            fresh = [number for number, memory in enumerate(memories) if memory not in self._known]
            if fresh:
                specs = self._meet([banks[number] for number in fresh], [parts[number] for number in fresh])
                self._known.update({memories[number]: spec for number, spec in zip(fresh, specs, strict=True)})
            return [self._known[memory] for memory in memories]

    def _meet(self, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> list[BankSpec]:
        first = len(self.store.banks)
        specs = [dataclasses.replace(bank, index=first + number) for number, bank in enumerate(banks)]
        peers = PeerGroup.of(self._group(), self.options.timeout_s, _MEETING, self.options.transport)
        packer = packer_for(peers, self.home.transport)
        # Ranks hold different experts, so their weights have no digest in common.
        packer.agree_on(specs, ["" for _ in specs])
        packed = [packer.pack_part(number, tensors) for number, tensors in enumerate(parts)]
        self.home.add(peers, packer.spread(packed), dict(zip((spec.index for spec in specs), parts, strict=True)))
        self.store.banks += packed
        return specs

    def banks_of(self, model: nn.Module) -> list[BankSpec]:
        """The adopted banks that parameters of `model` are parts of, in the model's order."""
        local = [value.to_local() if hasattr(value, "to_local") else value for value in model.parameters()]
        memories = dict.fromkeys(StorageWeakRef(value.untyped_storage()) for value in local)
        with self._lock:
            return [self._known[memory] for memory in memories if memory in self._known]


_adopted: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, AdoptedBanks]] = weakref.WeakKeyDictionary()
_adopted_lock = threading.Lock()


def adopted_banks(name: str, device: torch.device, options: AdoptionOptions) -> AdoptedBanks:
    """Those of the process group with that name. Raises InputError where they exist already, with other options."""
    group = next(group for group in c10d._world.pg_map if group.group_name == name)
    with _adopted_lock:
        of_group = _adopted.setdefault(group, {})
        if device not in of_group:
            of_group[device] = AdoptedBanks(group, device, options)
        found = of_group[device]
    if found.options != options:
        raise InputError(
            f"the experts of process group {name!r} stream with {found.options} already, and share one ring; compile "
            f"every model of that group with the same options, not with {options}"
        )
    return found


def adopted_parts(model: nn.Module) -> list[tuple[Transport, list[BankSpec]]]:
    """The adopted banks that `model` has parts of, with what moves them."""
    with _adopted_lock:
        everywhere = [banks for of_group in _adopted.values() for banks in of_group.values()]
    found = [(banks.home.transport, banks.banks_of(model)) for banks in everywhere]
    return [(transport, specs) for transport, specs in found if specs]


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
