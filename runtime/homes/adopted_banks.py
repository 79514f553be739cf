"""Banks adopted from the parameters of a model that runs with expert parallelism; their memory identifies a bank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.models.errors import InputError, one_of
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec
from moepass.runtime.banks.banks import Bank, BankStore, bank_key, find_bank
from moepass.runtime.banks.computed_parts import computed_parts
from moepass.runtime.banks.mutation_guard import MutationGuard, any_is_written
from moepass.runtime.homes.device_home import make_transport, packer_on
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.ranks.block_decisions import MEETING
from moepass.runtime.ranks.eager_watch import FailureCheck
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.system.processes import ProcessWatch
from moepass.runtime.system.tensor_memory import Memory, MemoryTable, memories_of
from moepass.runtime.transfer.home_protocol import Home, Transport
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring
from moepass.runtime.transfer.sources import Source

logger = logging.getLogger("moepass")


@dataclasses.dataclass(frozen=True)
class AdoptionOptions:
    """Options of the ring that adopted banks stream through; `moepass.options.Options` describes the fields."""

    slots: int = 2
    link: Link = dataclasses.field(default_factory=Link)
    timeout_s: float = DEFAULT_TIMEOUT_S
    transport: str = PULL


@dataclasses.dataclass(frozen=True, eq=False)
class AdoptedBank(Bank):
    """A bank whose shards are parameters of the ranks of a group.

    Attributes:
        sources: the shards of all ranks, in the order in which this rank copies them.
        memories, storages: the memory of each of this rank's parameters, and weak references to their storages.
        held_twice_bytes: bytes of this rank's parameters that exist again in the shard, see `PeerPacker.share_parts`.
    """

    sources: tuple[Source, ...]
    group: PeerGroup
    memories: tuple[Memory, ...]
    storages: tuple[StorageWeakRef, ...]
    guard: MutationGuard
    held_twice_bytes: int


class AdoptedHome(Home):
    """The shards of all ranks of a group. Raises an error if a shard changes after its adoption."""

    # The store of the banks; the adopter sets it.
    store: weakref.ref[BankStore]

    def __init__(self, transport: Transport, failures: FailureCheck) -> None:
        self.transport = transport
        self.watch = ProcessWatch()
        # The banks in use, by their index.
        self.banks: dict[int, AdoptedBank] = {}
        self._failures = failures
        self._has_removed_banks = False

    @property
    def _ring(self) -> Ring | None:
        store = self.store()
        return None if store is None else store.current_ring

    def check(self) -> None:
        """Raise PeerError if a rank of the banks in use has ended, or failed for good.

        In debug mode, raises InputError if a parameter that is the shard itself was written to. Without it, the host
        does not wait for the device.
        """
        self._failures.check()
        banks, ring = list(self.banks.values()), self._ring
        if self.watch.gone():
            for group in {bank.group for bank in banks}:
                group.check_alive()
        if ring is not None and ring.debug and any_is_written([bank.guard for bank in banks]):
            names = " and ".join(bank.spec.name for bank in banks if any_is_written([bank.guard]))
            raise InputError(_changed(names), name=names)
        if self._has_removed_banks and ring is not None:
            self._has_removed_banks = False
            ring.forget()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """Return the shards of all ranks. Raises InputError if this rank's parameters, `shards`, were changed."""
        adopted, ring = self.banks[bank.index], self._ring
        if not adopted.guard.are_unchanged(shards, debug=ring is not None and ring.debug):
            raise InputError(_changed(bank.name), name=bank.name)
        return adopted.sources

    def rank_of(self, bank: BankSpec) -> int:
        """Return this process's rank in the group of `bank`."""
        return self.banks[bank.index].group.rank

    def forget(self, bank: BankSpec) -> None:
        """Remove a bank from the transport and, before the next run, from the ring."""
        del self.banks[bank.index]
        self.transport.forget(bank)
        self._has_removed_banks = True


class BankAdopter:
    """The adoption of banks by one process group on one device. All of them stream through the ring of `store`.

    Once the last bank is removed, the ring is freed, and a new store with other options may take its place.
    """

    def __init__(self, device: torch.device, failures: FailureCheck) -> None:
        self.device = device
        self.options = AdoptionOptions()
        self._failures = failures
        self.store, self.home = self._make_store()
        # Banks of graphs whose runs the ranks agree on, adopted or not, with the memory of their parameters.
        self._agreed: MemoryTable[tuple[Memory, ...]] = MemoryTable()
        self._next_index = 0
        self._uses_of_name: dict[str, int] = {}
        self._is_removal_due = False
        self._lock = threading.Lock()
        self._owner = OwnerProcess()

    def adopt(
        self,
        group: ProcessGroup,
        banks: Sequence[BankSpec],
        parts: Sequence[Sequence[torch.Tensor]],
        options: AdoptionOptions | None = None,
    ) -> None:
        """Make `banks` available to `find_bank`. All ranks rendezvous here for banks that were not adopted before.

        `parts` has for each bank this rank's tensors, each [own experts, ...]. Eager code has no `options`: its banks
        stream like the group's other banks, or with the defaults if there are none.

        Raises PeerError if ranks are missing, have ended, or have other banks, SharedMemoryError if the machine has no
        shared memory left, and InputError if the ring has other options, or experts lie on another device.
        """
        for spec, tensors in zip(banks, parts, strict=True):
            devices = {str(tensor.device) for tensor in tensors} - {str(self.device)}
            if devices:
                text = (
                    f"experts of {spec.name} are on {min(devices)}, but stream to {self.device}; move the model to "
                    f"{self.device} before its first run"
                )
                raise InputError(text, name=spec.name, value=min(devices), expected=str(self.device))
        with self._locked():
            self._choose(group, options or (self.options if self.store.banks else AdoptionOptions()))
            keys = [bank_key(bank, tensors) for bank, tensors in zip(banks, parts, strict=True)]
            missing = [number for number, bank in enumerate(banks) if not self._has(bank, parts[number])]
            # A layer that is applied twice appears twice in `banks`; it is adopted once.
            numbers = sorted({keys[number]: number for number in reversed(missing)}.values())
            if numbers:
                adopted = self._meet(
                    group, [banks[number] for number in numbers], [parts[number] for number in numbers]
                )
                for number, bank in zip(numbers, adopted, strict=True):
                    # The meeting may have moved the parameters.
                    if self._agreed.pop(keys[number]) is not None:
                        self._agreed.add(bank_key(bank.spec, parts[number]), parts[number], bank.memories)

    def _has(self, bank: BankSpec, parts: Sequence[torch.Tensor]) -> bool:
        match = find_bank(bank, parts)
        return match is not None and match[0] is self.store

    def register_agreed(self, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Record that ranks agree on each run that reads these banks. They are adopted when a run gathers them."""
        with self._locked():
            for bank, tensors in zip(banks, parts, strict=True):
                self._agreed.add(bank_key(bank, tensors), tensors, memories_of(tensors))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._owner.check()
        with self._lock:
            self._remove_expired()
            yield
        if self._is_removal_due:
            self._remove_soon()

    def _choose(self, group: ProcessGroup, options: AdoptionOptions) -> None:
        if options == self.options:
            return
        # Without a ring only eager code has read these banks, and only the transport is fixed.
        has_ring = self.store.current_ring is not None
        if self.store.banks and (has_ring or options.transport != self.options.transport):
            text = (
                f"the experts of process group {group.group_name!r} stream with {self.options} already, and share one "
                f"ring; compile every model of that group with the same options, not with {options}"
            )
            raise InputError(text, name="options", value=options, expected=self.options)
        self.options = options
        if self.store.banks:
            self.store.slots, self.store.link = options.slots, options.link
        else:
            self.store, self.home = self._make_store()

    def _make_store(self) -> tuple[BankStore, AdoptedHome]:
        options = self.options
        home = AdoptedHome(make_transport(options.transport, options.link, self.device), self._failures)
        store = BankStore(self.device, options.slots, options.link, home)
        home.store = weakref.ref(store)
        return store, home

    def _meet(
        self, group: ProcessGroup, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]
    ) -> list[AdoptedBank]:
        uses_of_name = dict(self._uses_of_name)
        specs = [
            dataclasses.replace(bank, index=self._next_index + number, name=_unique_name(bank.name, uses_of_name))
            for number, bank in enumerate(banks)
        ]
        peers = PeerGroup.of(group, self.options.timeout_s, MEETING, self.options.transport, self.home.watch)
        packer = packer_on(self.device, group, peers, self.home.transport, bank_by_bank=True)
        # Ranks hold different experts, so their weights have no digest in common.
        packer.agree_on(specs, ["" for _ in specs])
        remove_soon = weakref.WeakMethod(self._remove_soon)  # the parameters must not keep this object alive

        def when_freed() -> None:
            if (remove := remove_soon()) is not None:
                remove()

        shards, moved = [], []
        for number, tensors in enumerate(parts):
            shards.append(packer.pack_part(number, tensors))
            if not self.home.transport.is_one_sided:
                # This rank sends the shard, so a write to the parameters must not change it.
                moved.append([False] * len(tensors))
                continue
            # Parameters move bank by bank, so that only one bank is in memory twice.
            with peers.rendezvous.publishing_failures():
                moved.append(packer.share_parts(number, tensors, when_freed))
        sources = packer.spread(shards)
        # Only now: a meeting that failed leaves no trace on any rank.
        self._next_index += len(banks)
        self._uses_of_name = uses_of_name
        adopted = [
            AdoptedBank(
                bank.spec,
                bank.shard,
                sources[bank.spec.index],
                peers,
                memories_of(tensors),
                tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors),
                _guard(packer, bank, number, tensors, are_moved),
                sum(tensor.nbytes for tensor, is_moved in zip(tensors, are_moved, strict=True) if not is_moved),
            )
            for number, (bank, tensors, are_moved) in enumerate(zip(shards, parts, moved, strict=True))
        ]
        for bank, tensors in zip(adopted, parts, strict=True):
            self.home.banks[bank.spec.index] = bank
            self.store.add(bank, tensors)
        held_twice_bytes = sum(bank.held_twice_bytes for bank in adopted)
        if held_twice_bytes:
            logger.info(
                "%d of %d bytes of experts are in memory twice, in the model and in the shards: they are not "
                "contiguous, they are converted, or something else uses their memory",
                held_twice_bytes,
                sum(bank.shard.numel() for bank in shards),
            )
        return adopted

    def banks_of(self, model: nn.Module) -> list[BankSpec]:
        """Return the adopted banks made of parameters of `model`, in its order; a shared bank once per use.

        Raises InputError if ranks agree on each run of these banks, so that no rank may stay away, or if banks share
        their first parameter.
        """
        values = (value for _, value in model.named_parameters(remove_duplicate=False))
        memories = memories_of(value.to_local() if hasattr(value, "to_local") else value for value in values)
        with self._locked():
            if any(memory in memories for of_tensors in self._agreed.living().values() for memory in of_tensors):
                raise InputError(
                    f"gather_only_step cannot be used with {type(model).__name__}, because all ranks must agree on "
                    "each of its runs: it is compiled with all_to_all_below, or its ranks sum the results of their "
                    "experts. On a rank without work, call the model instead: with no tokens, or, if results are "
                    "summed, with the same tokens as the other ranks"
                )
            first_memories = [(bank.memories[0], bank.spec) for bank in self.home.banks.values()]
        spec_of = dict(first_memories)
        shared = [spec.name for memory, spec in first_memories if memory in memories and spec_of[memory] is not spec]
        if shared:
            raise InputError(
                f"the experts of {one_of(shared)} and of another layer have the same first parameter, so that "
                "gather_only_step cannot distinguish them: call the model itself instead, with no tokens"
            )
        return [spec_of[memory] for memory in memories if memory in spec_of]

    def _remove_soon(self) -> None:
        """Remove expired banks now, or when the lock is released. May run in a thread that holds the lock."""
        self._is_removal_due = True
        while self._is_removal_due and self._lock.acquire(blocking=False):
            try:
                self._remove_expired()
            finally:
                self._lock.release()

    def _remove_expired(self) -> None:
        self._is_removal_due = False
        for bank in list(self.home.banks.values()):
            if any(storage.expired() for storage in bank.storages):  # no graph can read this bank again
                self.store.remove(bank)
                self.home.forget(bank.spec)


def _guard(
    packer: PeerPacker, bank: Bank, number: int, parts: Sequence[torch.Tensor], are_moved: Sequence[bool]
) -> MutationGuard:
    originals = [spec.view(bank.shard) for spec in packer.parameters(number)]
    tensors = packer.layout(number).tensors
    return MutationGuard(
        parts,
        originals,
        None if packer.is_copied_on_write else are_moved[: len(originals)],
        functools.partial(computed_parts, bank.spec),
        [tensors[recipe.position].view(bank.shard) for recipe in bank.spec.recipes],
    )


def _changed(name: str) -> str:
    return (
        f"the expert weights of {name} were changed after their first run, but other ranks have the old ones; "
        "load weights before that run, or later as new parameters, which the ranks exchange again: "
        "model.load_state_dict(state, assign=True) on every rank"
    )


def _unique_name(name: str, uses_of_name: dict[str, int]) -> str:
    """Return `name`, with a number from its second use on: layers that share code share a name."""
    uses_of_name[name] = uses = uses_of_name.get(name, 0) + 1
    return name if uses == 1 else f"{name} ({uses})"


_adopters: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, BankAdopter]] = weakref.WeakKeyDictionary()
_adopters_lock = threading.Lock()


def adopted_banks(group: ProcessGroup, device: torch.device) -> BankAdopter:
    """Return the adopter of `group` for `device`, which lives as long as the group."""
    with _adopters_lock:
        of_group = _adopters.setdefault(group, {})
        if device not in of_group:
            of_group[device] = BankAdopter(device, FailureCheck(group))
        return of_group[device]


def adopted_parts(model: nn.Module) -> list[tuple[Transport, list[BankSpec]]]:
    """Return the adopted banks made of parameters of `model`, with the transport that moves them."""
    with _adopters_lock:
        adopters = [adopter for of_group in _adopters.values() for adopter in of_group.values()]
    banks = [(adopter.home.transport, adopter.banks_of(model)) for adopter in adopters]
    return [(transport, specs) for transport, specs in banks if specs]
