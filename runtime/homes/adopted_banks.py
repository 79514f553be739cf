"""The adopted banks of one process group: which there are, where their shards lie, and when they are gone.

A bank is known by the memory of this rank's tensors, so the code that Dynamo shares between layers finds the experts of
each. It goes with that memory: where a model is gone, its shards are unmapped, and with the last one the ring.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.models.errors import InputError
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec
from moepass.passes.ir.shards import shard_layout
from moepass.runtime.banks.mutation_guard import MutationGuard, any_is_written
from moepass.runtime.homes.collective import make_transport
from moepass.runtime.homes.device_home import packer_on
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.homes.shared_parameters import share_parts
from moepass.runtime.ranks.decisions import MEETING
from moepass.runtime.ranks.eager_watch import FailureLook
from moepass.runtime.system.forking import renew_after_fork
from moepass.runtime.system.processes import ProcessWatch
from moepass.runtime.system.tensor_memory import Memory, memory_of
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring, make_ring
from moepass.runtime.transfer.sources import Source
from moepass.runtime.transfer.transports import Transport

logger = logging.getLogger("moepass")


@dataclasses.dataclass(frozen=True)
class AdoptionOptions:
    """How adopted banks stream: see `moepass.options.Options`."""

    slots: int = 2
    link: Link = dataclasses.field(default_factory=Link)
    timeout_s: float = DEFAULT_TIMEOUT_S
    transport: str = PULL


# What a bank consists of, and the memory of this rank's part of each tensor.
BankKey = tuple[object, tuple[Memory, ...]]


def _key(bank: BankSpec, parts: Sequence[torch.Tensor]) -> BankKey:
    return (bank.tensors, bank.expert_bounds), tuple(memory_of(part) for part in parts)


@dataclasses.dataclass(frozen=True, eq=False)
class AdoptedBank:
    """A bank that ranks met for. `held_twice_bytes` of this rank's part lie in memory of their own beside the shard."""

    spec: BankSpec
    sources: tuple[Source, ...]
    group: PeerGroup
    storages: tuple[StorageWeakRef, ...]
    watch: MutationGuard
    held_twice_bytes: int

    @property
    def is_gone(self) -> bool:
        """True once a tensor of it was freed: no graph can bring these tensors again."""
        return any(storage.expired() for storage in self.storages)


class AdoptedHome(Home):
    """Shards on all ranks, brought together meeting by meeting; a shard that changed afterwards is an error."""

    def __init__(self, transport: Transport, failures: FailureLook) -> None:
        self.transport = transport
        self._failures = failures
        self.watch = ProcessWatch()
        self.ring: weakref.ref[Ring] | None = None
        self._banks: dict[int, AdoptedBank] = {}
        self._has_lost_banks = False

    @property
    def held_twice_bytes(self) -> int:
        """Bytes of this rank's experts that lie in memory of their own and in the shards: see `share_parts`."""
        return sum(bank.held_twice_bytes for bank in list(self._banks.values()))

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(shard_layout(bank.spec, bank.group.rank).nbytes for bank in list(self._banks.values()))

    def check(self) -> None:
        """Raises PeerError where a rank is gone that a bank in use was brought together with, or failed for good;
        InputError where somebody wrote into parameters that are the shard itself.
        """
        self._failures.check()
        banks = list(self._banks.values())
        if self.watch.gone():
            for group in {bank.group for bank in banks}:
                group.check_alive()
        if any_is_written([bank.watch for bank in banks]):
            raise InputError(_changed(" and ".join(bank.spec.name for bank in banks if any_is_written([bank.watch]))))
        if self._has_lost_banks and self.ring is not None and (ring := self.ring()) is not None:
            self._has_lost_banks = False
            ring.forget()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The shards of all ranks. Raises InputError where this rank's part is not what the others were given."""
        adopted = self._banks[bank.index]
        if not adopted.watch.are_unchanged(shards):
            raise InputError(_changed(bank.name))
        return adopted.sources

    def add(self, bank: AdoptedBank) -> None:
        self._banks[bank.spec.index] = bank

    def drop(self, bank: AdoptedBank) -> None:
        """Nothing will read it again; a ring may still remember it."""
        del self._banks[bank.spec.index]
        self.transport.forget(bank.spec)
        self._has_lost_banks = True


class ParameterBanks:
    """The adopted banks of one process group on one device, and the ring that all of them stream through.

    When the last bank is gone, so is the ring, and other options may be used.
    """

    def __init__(self, device: torch.device, failures: FailureLook) -> None:
        self.device = device
        self.options = AdoptionOptions()
        self._failures = failures
        self.home = AdoptedHome(make_transport(self.options.transport, self.options.link), failures)
        self._ring: Ring | None = None
        self._known: dict[BankKey, AdoptedBank] = {}
        # Banks of graphs with a dispatch, met for or not: ranks agree on each of their runs. Their storages keep the
        # keys unique.
        self._agreed: dict[BankKey, tuple[StorageWeakRef, ...]] = {}
        self._next_index = 0
        self._uses_of_name: dict[str, int] = {}
        self._is_drop_due = False
        self._lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def adopt(
        self,
        group: ProcessGroup,
        banks: Sequence[BankSpec],
        parts: Sequence[Sequence[torch.Tensor]],
        options: AdoptionOptions,
        debug: bool = False,
    ) -> tuple[Ring, list[BankSpec]]:
        """The ring, and the banks as it numbers them. `parts` are this rank's tensors [own experts, ...] of each.

        Where a bank is seen for the first time, all ranks meet here. Raises PeerError where ranks are missing, gone, or
        bring other banks; SharedMemoryError where the machine has none; InputError where the ring has other options, or
        experts lie on another device.
        """
        for spec, tensors in zip(banks, parts, strict=True):
            elsewhere = {str(tensor.device) for tensor in tensors} - {str(self.device)}
            if elsewhere:
                raise InputError(f"experts of {spec.name} lie on {min(elsewhere)}, but stream to {self.device}")
        with self._locked():
            self._choose(group, options)
            keys = [_key(bank, tensors) for bank, tensors in zip(banks, parts, strict=True)]
            # A layer that is applied twice brings its bank twice.
            fresh = {key: number for number, key in reversed(list(enumerate(keys))) if key not in self._known}
            found = {key: bank for key, bank in self._known.items() if key in keys}
            numbers = sorted(fresh.values())
            if fresh:
                met = self._meet(group, [banks[number] for number in numbers], [parts[number] for number in numbers])
                found |= {keys[number]: bank for number, bank in zip(numbers, met, strict=True)}
                for number, bank in zip(numbers, met, strict=True):
                    # Their memory may be another one now.
                    key = _key(bank.spec, parts[number])
                    self._known[key] = bank
                    if self._agreed.pop(keys[number], None) is not None:
                        self._agreed[key] = bank.storages
            return self._ring_for(debug), [found[key].spec for key in keys]

    def register_agreed(self, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """From now on ranks agree on each run of these banks, which are adopted later, when a run gathers them."""
        with self._locked():
            for bank, tensors in zip(banks, parts, strict=True):
                storages = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
                self._agreed[_key(bank, tensors)] = storages

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._drop_gone()
            yield
        if self._is_drop_due:
            self._drop_soon()

    def _choose(self, group: ProcessGroup, options: AdoptionOptions) -> None:
        if self._known and options != self.options:
            raise InputError(
                f"the experts of process group {group.group_name!r} stream with {self.options} already, and share one "
                f"ring; compile every model of that group with the same options, not with {options}"
            )
        if options != self.options:
            self.options = options
            self.home = AdoptedHome(make_transport(options.transport, options.link), self._failures)

    def _ring_for(self, debug: bool) -> Ring:
        slots = min(self.options.slots, len(self._known))
        slot_bytes = max((bank.spec.nbytes for bank in self._known.values()), default=0)
        if self._ring is None:
            self._ring = make_ring(slots, slot_bytes, self.device, self.options.link, home=self.home)
            self.home.ring = weakref.ref(self._ring)
        self._ring.reserve(slots, slot_bytes)
        # Once asked for, poisoning stays on: all graphs share the ring.
        self._ring.debug = self._ring.debug or debug
        return self._ring

    def _meet(
        self, group: ProcessGroup, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]
    ) -> list[AdoptedBank]:
        uses_of_name = dict(self._uses_of_name)
        specs = [
            dataclasses.replace(bank, index=self._next_index + number, name=_name(bank.name, uses_of_name))
            for number, bank in enumerate(banks)
        ]
        peers = PeerGroup.of(group, self.options.timeout_s, MEETING, self.options.transport, self.home.watch)
        packer = packer_on(self.device, group, peers, self.home.transport)
        # Ranks hold different experts, so their weights have no digest in common.
        packer.agree_on(specs, ["" for _ in specs])
        shards, moved = [], []
        for number, tensors in enumerate(parts):
            shards.append(packer.pack_part(number, tensors))
            if not self.home.transport.is_one_sided:
                # What ranks send to each other must not change under a write of one of them.
                moved.append([False] * len(tensors))
                continue
            # Bank by bank, so that no more than one is there twice. (On CUDA memory for all was taken at once.)
            with peers.rendezvous.telling_failures():
                moved.append(share_parts(packer, number, tensors, self._weakly(ParameterBanks._drop_soon)))
        spread = packer.spread(shards)
        # Not before: a meeting that failed has not been, on any rank.
        self._next_index += len(banks)
        self._uses_of_name = uses_of_name
        met = [
            AdoptedBank(
                bank.spec,
                spread[bank.spec.index],
                peers,
                tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors),
                _watch(packer, bank.shard, number, tensors, lie_there),
                sum(tensor.nbytes for tensor, lies_there in zip(tensors, lie_there, strict=True) if not lies_there),
            )
            for number, (bank, tensors, lie_there) in enumerate(zip(shards, parts, moved, strict=True))
        ]
        for bank in met:
            self.home.add(bank)
        held_twice_bytes = sum(bank.held_twice_bytes for bank in met)
        if held_twice_bytes:
            logger.info(
                "%d of %d bytes of experts are held twice, in the model and in the shards: they are not contiguous, "
                "or something else uses their memory",
                held_twice_bytes,
                sum(bank.shard.numel() for bank in shards),
            )
        return met

    def banks_of(self, model: nn.Module) -> list[BankSpec]:
        """The adopted banks that parameters of `model` are parts of, in its order; once for each place in the model.

        Raises InputError where ranks agree on each of their runs, so that none may stay away.
        """
        values = (value for _, value in model.named_parameters(remove_duplicate=False))
        memories = [memory_of(value.to_local() if hasattr(value, "to_local") else value) for value in values]
        with self._locked():
            if any(memory in memories for _, of_tensors in self._agreed for memory in of_tensors):
                raise InputError(
                    f"{type(model).__name__} is compiled with all_to_all_below, or its ranks add up the results of "
                    "their experts, so that all of them agree on each run: let a rank without work call the model "
                    "itself in place of gather_only_step, with no tokens, or with those of all where they add up"
                )
            of_memory = {parts[0]: bank.spec for (_, parts), bank in self._known.items()}
        return [of_memory[memory] for memory in memories if memory in of_memory]

    def _weakly(self, method: Callable[[ParameterBanks], None]) -> Callable[[], None]:
        """Calls `method` of this object if it is there still."""
        reference = weakref.ref(self)

        def call() -> None:
            banks = reference()
            if banks is not None:
                method(banks)

        return call

    def _drop_soon(self) -> None:
        """Memory of a model was freed: in whatever thread that happens, and whatever that thread holds."""
        self._is_drop_due = True
        while self._is_drop_due and self._lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                self._lock.release()

    def _drop_gone(self) -> None:
        self._is_drop_due = False
        self._agreed = {
            key: storages
            for key, storages in self._agreed.items()
            if not any(storage.expired() for storage in storages)
        }
        gone = [key for key, bank in self._known.items() if bank.is_gone]
        for key in gone:
            self.home.drop(self._known.pop(key))
        if not self._known:
            self._ring = None


def _watch(
    packer: PeerPacker, shard: torch.Tensor, number: int, parts: Sequence[torch.Tensor], lie_there: Sequence[bool]
) -> MutationGuard:
    kept = [place.view(shard) for place in packer.layout(number).tensors]
    if packer.is_copied_on_write:
        return MutationGuard(parts, kept, lie_there)
    return MutationGuard(parts, kept, are_shard=lie_there)


def _changed(name: str) -> str:
    return (
        f"the expert weights of {name} were changed after their first compiled run, but other ranks have the old ones; "
        "load weights before that run, or later as new parameters, for which the ranks meet again: "
        "model.load_state_dict(state, assign=True) on every rank"
    )


def _name(name: str, uses_of_name: dict[str, int]) -> str:
    """The layers that share code share a name: from the second on, a number tells them apart."""
    uses_of_name[name] = uses = uses_of_name.get(name, 0) + 1
    return name if uses == 1 else f"{name} ({uses})"


_adopted: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, ParameterBanks]] = weakref.WeakKeyDictionary()
_adopted_lock = threading.Lock()


def adopted_banks(group: ProcessGroup, device: torch.device) -> ParameterBanks:
    """Those of `group` on `device`, which live as long as the group."""
    with _adopted_lock:
        of_group = _adopted.setdefault(group, {})
        if device not in of_group:
            of_group[device] = ParameterBanks(device, FailureLook(group))
        return of_group[device]


def adopted_parts(model: nn.Module) -> list[tuple[Transport, list[BankSpec]]]:
    """The adopted banks that `model` has parts of, with what moves them."""
    with _adopted_lock:
        everywhere = [banks for of_group in _adopted.values() for banks in of_group.values()]
    found = [(banks.home.transport, banks.banks_of(model)) for banks in everywhere]
    return [(transport, specs) for transport, specs in found if specs]
