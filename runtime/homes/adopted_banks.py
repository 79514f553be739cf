"""The adopted banks of one process group: their specs, their shards, and when they are freed.

The memory of this rank's tensors identifies a bank. So code that Dynamo shares between layers finds the experts of each
layer, and eager code finds the banks of compiled code. When a model is freed, its shards are unmapped; the ring is
freed with the last shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef

from moepass.models.errors import InputError, one_of
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec
from moepass.runtime.banks.computed_parts import computed_parts
from moepass.runtime.banks.identity import (
    BankKeeper,
    MemoryTable,
    bank_key,
    find_bank,
    memories_of,
    register_bank,
)
from moepass.runtime.banks.mutation_guard import MutationGuard, any_is_written
from moepass.runtime.homes.device_home import make_transport, packer_on
from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import DEFAULT_TIMEOUT_S, PeerGroup
from moepass.runtime.homes.shared_parameters import share_parts
from moepass.runtime.ranks.decisions import MEETING
from moepass.runtime.ranks.eager_watch import FailureLook
from moepass.runtime.system.forking import OwnerProcess
from moepass.runtime.system.processes import ProcessWatch
from moepass.runtime.system.tensor_memory import Memory
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.ring import Ring
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


@dataclasses.dataclass(frozen=True, eq=False)
class AdoptedBank:
    """A bank that ranks met for. `memories` are those of this rank's part of each tensor, `held_twice_bytes` of which
    lie beside the shard.
    """

    spec: BankSpec
    sources: tuple[Source, ...]
    group: PeerGroup
    memories: tuple[Memory, ...]
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
        # Whether the bytes of parameters are compared with what they were: on a GPU the host waits to tell.
        self.is_debug = False
        self._banks: dict[int, AdoptedBank] = {}
        self._has_lost_banks = False

    @property
    def held_twice_bytes(self) -> int:
        """Bytes of this rank's experts that lie in memory of their own and in the shards: see `share_parts`."""
        return sum(bank.held_twice_bytes for bank in self.banks())

    def check(self) -> None:
        """Raises PeerError where a rank is gone that a bank in use was brought together with, or failed for good; with
        `is_debug`, InputError where somebody wrote into parameters that are the shard itself.
        """
        self._failures.check()
        banks = self.banks()
        if self.watch.gone():
            for group in {bank.group for bank in banks}:
                group.check_alive()
        if self.is_debug and any_is_written([bank.watch for bank in banks]):
            names = " and ".join(bank.spec.name for bank in banks if any_is_written([bank.watch]))
            raise InputError(_changed(names), name=names)
        if self._has_lost_banks and self.ring is not None and (ring := self.ring()) is not None:
            self._has_lost_banks = False
            ring.forget()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The shards of all ranks. Raises InputError where this rank's part is not what the others were given."""
        adopted = self._banks[bank.index]
        if not adopted.watch.are_unchanged(shards, self.is_debug):
            raise InputError(_changed(bank.name), name=bank.name)
        return adopted.sources

    def rank_of(self, bank: BankSpec) -> int:
        return self._banks[bank.index].group.rank

    def add(self, bank: AdoptedBank) -> None:
        self._banks[bank.spec.index] = bank

    def banks(self) -> list[AdoptedBank]:
        return list(self._banks.values())

    def drop(self, bank: AdoptedBank) -> None:
        """Nothing will read it again; a ring may still remember it."""
        del self._banks[bank.spec.index]
        self.transport.forget(bank.spec)
        self._has_lost_banks = True


class ParameterBanks(BankKeeper):
    """The adopted banks of one process group on one device, and the ring that all of them stream through.

    When the last bank is gone, so is the ring, and other options may be used.
    """

    home: AdoptedHome

    def __init__(self, device: torch.device, failures: FailureLook) -> None:
        super().__init__(device)
        self._failures = failures
        self._use(AdoptionOptions())
        self.home = self._make_home()
        # Banks of graphs with a dispatch, met for or not: ranks agree on each of their runs.
        self._agreed: MemoryTable[tuple[Memory, ...]] = MemoryTable()
        self._next_index = 0
        self._uses_of_name: dict[str, int] = {}
        self._is_drop_due = False
        self._lock = threading.Lock()
        self._owner = OwnerProcess()

    def adopt(
        self,
        group: ProcessGroup,
        banks: Sequence[BankSpec],
        parts: Sequence[Sequence[torch.Tensor]],
        options: AdoptionOptions | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Let `find_bank` know `banks`; `parts` are this rank's tensors [own experts, ...] of each.

        Where a bank is seen for the first time, all ranks meet here. Eager code comes without `options`: then those
        count that banks of the group have already, else `timeout_s`. Raises PeerError where ranks are missing, gone, or
        bring other banks; SharedMemoryError where the machine has none; InputError where the ring has other options, or
        experts lie on another device.
        """
        for spec, tensors in zip(banks, parts, strict=True):
            elsewhere = {str(tensor.device) for tensor in tensors} - {str(self.device)}
            if elsewhere:
                raise InputError(
                    f"experts of {spec.name} lie on {min(elsewhere)}, but stream to {self.device}",
                    name=spec.name,
                    value=min(elsewhere),
                    expected=str(self.device),
                )
        with self._locked():
            self._choose(group, options or (self.options if self.specs() else AdoptionOptions(timeout_s=timeout_s)))
            keys = [bank_key(bank, tensors) for bank, tensors in zip(banks, parts, strict=True)]
            unknown = [number for number, bank in enumerate(banks) if not self._has(bank, parts[number])]
            # A layer that is applied twice brings its bank twice.
            fresh = {keys[number]: number for number in reversed(unknown)}
            numbers = sorted(fresh.values())
            if fresh:
                met = self._meet(group, [banks[number] for number in numbers], [parts[number] for number in numbers])
                for number, bank in zip(numbers, met, strict=True):
                    # Their memory may be another one now.
                    register_bank(self, bank.spec, parts[number])
                    if self._agreed.pop(keys[number]) is not None:
                        self._agreed.add(bank_key(bank.spec, parts[number]), parts[number], bank.memories)

    def _has(self, bank: BankSpec, parts: Sequence[torch.Tensor]) -> bool:
        found = find_bank(bank, parts)
        return found is not None and found.keeper is self

    def register_agreed(self, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """From now on ranks agree on each run of these banks, which are adopted later, when a run gathers them."""
        with self._locked():
            for bank, tensors in zip(banks, parts, strict=True):
                self._agreed.add(bank_key(bank, tensors), tensors, memories_of(tensors))

    def specs(self) -> list[BankSpec]:
        return [bank.spec for bank in self.home.banks()]

    def ring(self, debug: bool = False, slot_bytes: int | None = None) -> Ring:
        ring = super().ring(debug, slot_bytes)
        self.home.ring, self.home.is_debug = weakref.ref(ring), ring.debug
        return ring

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._owner.check()
        with self._lock:
            self._drop_gone()
            yield
        if self._is_drop_due:
            self._drop_soon()

    def _choose(self, group: ProcessGroup, options: AdoptionOptions) -> None:
        if options == self.options:
            return
        # Without a ring, only how shards are brought together is settled: eager code has used these banks alone.
        if self.home.banks() and (self._ring is not None or options.transport != self.options.transport):
            raise InputError(
                f"the experts of process group {group.group_name!r} stream with {self.options} already, and share one "
                f"ring; compile every model of that group with the same options, not with {options}",
                name="options",
                value=options,
                expected=self.options,
            )
        self._use(options)
        if not self.home.banks():
            self.home = self._make_home()

    def _use(self, options: AdoptionOptions) -> None:
        self.options, self.slots, self.link = options, options.slots, options.link

    def _make_home(self) -> AdoptedHome:
        return AdoptedHome(make_transport(self.options.transport, self.link, self.device), self._failures)

    def _meet(
        self, group: ProcessGroup, banks: Sequence[BankSpec], parts: Sequence[Sequence[torch.Tensor]]
    ) -> list[AdoptedBank]:
        uses_of_name = dict(self._uses_of_name)
        specs = [
            dataclasses.replace(bank, index=self._next_index + number, name=_name(bank.name, uses_of_name))
            for number, bank in enumerate(banks)
        ]
        peers = PeerGroup.of(group, self.options.timeout_s, MEETING, self.options.transport, self.home.watch)
        packer = packer_on(self.device, group, peers, self.home.transport, bank_by_bank=True)
        # Ranks hold different experts, so their weights have no digest in common.
        packer.agree_on(specs, ["" for _ in specs])
        shards, moved = [], []
        for number, tensors in enumerate(parts):
            shards.append(packer.pack_part(number, tensors))
            if not self.home.transport.is_one_sided:
                # A write of one rank must not change the bytes that it sends.
                moved.append([False] * len(tensors))
                continue
            # Bank by bank, so that no more than one is there twice.
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
                memories_of(tensors),
                tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors),
                _watch(packer, bank.spec, bank.shard, number, tensors, lie_there),
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
                "something else uses their memory, or they are converted",
                held_twice_bytes,
                sum(bank.shard.numel() for bank in shards),
            )
        return met

    def banks_of(self, model: nn.Module) -> list[BankSpec]:
        """The adopted banks that parameters of `model` are parts of, in its order; once for each place in the model.

        Raises InputError where ranks agree on each of their runs, so that none may stay away, and where banks share
        their first parameter.
        """
        values = (value for _, value in model.named_parameters(remove_duplicate=False))
        memories = memories_of(value.to_local() if hasattr(value, "to_local") else value for value in values)
        with self._locked():
            if any(memory in memories for of_tensors in self._agreed.living().values() for memory in of_tensors):
                raise InputError(
                    f"{type(model).__name__} is compiled with all_to_all_below, or its ranks add up the results of "
                    "their experts, so that all of them agree on each run: let a rank without work call the model "
                    "itself in place of gather_only_step, with no tokens, or with those of all where they add up"
                )
            known = [(bank.memories[0], bank.spec) for bank in self.home.banks()]
        of_memory = dict(known)
        shared = [spec.name for memory, spec in known if memory in memories and of_memory[memory] is not spec]
        if shared:
            raise InputError(
                f"the experts of {one_of(shared)} and of another layer begin with one parameter, so that it does not "
                "tell which of them a run gathers: call the model itself in place of gather_only_step, with no tokens"
            )
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
        for bank in self.home.banks():
            if bank.is_gone:
                self.home.drop(bank)
        if not self.home.banks():
            self._ring = None


def _watch(
    packer: PeerPacker,
    spec: BankSpec,
    shard: torch.Tensor,
    number: int,
    parts: Sequence[torch.Tensor],
    lie_there: Sequence[bool],
) -> MutationGuard:
    kept = [place.view(shard) for place in packer.parameters(number)]
    tensors = packer.layout(number).tensors
    return MutationGuard(
        parts,
        kept,
        None if packer.is_copied_on_write else lie_there[: len(kept)],
        functools.partial(computed_parts, spec),
        [tensors[recipe.position].view(shard) for recipe in spec.recipes],
    )


def _changed(name: str) -> str:
    return (
        f"the expert weights of {name} were changed after their first run, but other ranks have the old ones; "
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
    """The banks of `group` on `device`; they live as long as the group."""
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
