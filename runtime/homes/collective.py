"""Transport `collective`: all ranks gather a bank at the same time, over a network.

One copy thread works on all gathers of a rank, in the order in which the ring and eager code submit them. README.md
describes gathers on CUDA, which tests run on emulated streams.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NoReturn

import torch

from moepass.models.errors import InputError
from moepass.models.homes import COLLECTIVE
from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.passes.ir.shards import clip_pieces
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import NcclLinks
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from moepass.runtime.transfer.copying import Action, CopyThread, SlotCopy
from moepass.runtime.transfer.home_protocol import Transport
from moepass.runtime.transfer.lanes import HOST_LANE, Lane, StreamLane
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, Source, check_slot


@dataclasses.dataclass(frozen=True)
class GatherAction(Action):
    """This rank's share of one gather: it sends all of `own` and receives the pieces of `sources`.

    `sources` are all ranks' shards, by rank; this rank's is not over a link. A rank that does not receive only sends.
    """

    group: GatherGroup
    request: Request
    own: MemorySource
    sources: tuple[Source, ...]
    label: str
    plan: GatherSignature = NO_GATHER_SIGNATURE
    receives: bool = True

    def fill(self, copy: SlotCopy, link: Link) -> None:
        """Gather with the other ranks, once the slot is free. Raises the same PeerError on all ranks."""
        copy.wait_for_slot()
        try:
            started = self._gather(copy)
        except PeerError:
            raise
        except Exception as error:
            reason = f"rank {self.group.rank} could not gather bank {self.label}: {type(error).__name__}: {error}"
            raise self.group.fail(PeerError(reason, rank=self.group.rank)) from error
        if self.receives:
            copy.wait_for_link(link, started)

    def _gather(self, copy: SlotCopy) -> float:
        """Gather; return when bytes began to move, as a time of `time.perf_counter`."""
        self.own.check_bounds()
        if self.receives:
            check_slot(self.sources, copy.slot)
        wanted_by = self.group.ask(self.request, self.receives, self.plan)
        started = time.perf_counter()
        pieces = [self.own.memory.narrow(0, piece.source_offset_bytes, piece.nbytes) for piece in self.own.pieces]
        send = {rank: pieces for rank, wants in wanted_by.items() if wants}
        if not self.receives:
            self.group.gather(self.request, send, {})
            return started
        receive = {
            rank: [copy.slot.narrow(0, piece.slot_offset_bytes, piece.nbytes) for piece in source.pieces]
            for rank, source in enumerate(self.sources)
            if rank != self.group.rank
        }

        def bring_own_shard() -> None:
            copy.bring([self.sources[self.group.rank]])

        self.group.gather(self.request, send, receive, overlapped=bring_own_shard)
        return started

    def raise_error(self, label: str, error: BaseException) -> NoReturn:
        """Raise PeerError, with the ranks that `error` names."""
        raise (copy.copy(error) if isinstance(error, PeerError) else PeerError(str(error))) from error


class CollectiveTransport(Transport):
    """Gathers over connections that `connect` makes. All ranks gather the same banks in the same order."""

    is_one_sided = False

    def __init__(self, link: Link) -> None:
        super().__init__(COLLECTIVE)
        self._copies = CopyThread(link)
        self._group: GatherGroup | None = None
        self._banks: dict[int, tuple[BankSpec, tuple[Source, ...]]] = {}
        # Gathers of past runs by the first gather of each run, the last run last.
        self._runs: dict[Request, list[Request]] = {}
        self._run: list[Request] | None = None
        # True during an eager forward of the whole model, which is one run.
        self._in_forward = False
        # The order of gathers in the present compiled run.
        self._plan = NO_GATHER_SIGNATURE

    def connect(self, rendezvous: Rendezvous) -> None:
        """Make the connections on the first call. Raises the errors of `_make_group`."""
        if self._group is None:
            self._group = self._make_group(rendezvous, functools.partial(_describe, self._banks))

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> GatherGroup:
        return GatherGroup(rendezvous, describe)

    def add(self, bank: BankSpec, sources: Sequence[Source]) -> None:
        """Make `bank` available for gathers; `sources` are the shards of all ranks, by rank."""
        self._banks[bank.index] = (bank, tuple(sources))

    def copy_thread(self, link: Link) -> CopyThread:
        """Return the one thread that works on all gathers."""
        return self._copies

    def action(self, bank: BankSpec, sources: Sequence[Source]) -> GatherAction:
        """Return the next gather of this run; `sources` are the shards of all ranks as they go into a slot."""
        request = (bank.index, 0, bank.format.link_bytes)
        self._learn(request)
        return self._gather(request, sources)

    def read(
        self, bank: BankSpec, sources: Sequence[Source], start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        """Gather bytes [start, stop) of the complete bank outside of a ring, and wait for them."""
        memory = torch.empty(stop - start, dtype=torch.uint8, device=device)
        self._learn((bank.index, start, stop))
        self._copies.submit(self._gather_now((bank.index, start, stop), memory)).wait()
        return memory

    def forget(self, bank: BankSpec) -> None:
        """Remove a bank that no rank will gather again."""
        self._banks.pop(bank.index, None)

    def begin_forward(self) -> None:
        """Begin an eager forward of the model: all gathers until `end_forward` belong to one run."""
        self._in_forward = True
        self._run = []

    def end_forward(self) -> None:
        """End the forward, with or without an error."""
        self._in_forward = False
        self._run = None

    def begin_run(self, plan: GatherSignature = NO_GATHER_SIGNATURE) -> None:
        """Begin a compiled run with the given order of gathers. Raises PeerError if gathering has failed before."""
        self._plan = plan
        if self._group is not None:
            self._group.check()
        if not self._in_forward:
            self._run = []

    def end_run(self) -> None:
        """End the compiled run."""
        self._plan = NO_GATHER_SIGNATURE
        if not self._in_forward:
            self._run = None

    def fail(self, reason: str) -> None:
        """End gathering on all ranks, because a run ended with an error."""
        self._plan = NO_GATHER_SIGNATURE
        self.end_forward()
        if self._group is not None:
            rank = self._group.rank
            text = f"rank {rank} left a run in the middle, so that no rank can gather: {reason}"
            self._group.fail(PeerError(text, rank=rank))

    def join(self, banks: Sequence[BankSpec]) -> None:
        """Take part in the gathers of one forward that reads `banks`, without receiving anything.

        The gathers come in the order of the last forward, or of `banks` before the first one. Raises PeerError if a
        gather failed, and InputError, before any gather, if a bank appears several times and no forward was one run.
        """
        indices = {bank.index for bank in banks}
        runs = [run for first, run in self._runs.items() if first[0] in indices]
        if len(indices) < len(banks) and not _is_forward(runs, indices):
            shared = next(bank for index, bank in enumerate(banks) if bank in banks[:index])
            reason = (
                "the last forward on this rank ran in parts: compile the model as one graph, or let this rank run a "
                "forward in place of gather_only_step"
                if runs
                else "this rank has run no forward yet: let every rank run one before the first gather_only_step"
            )
            raise InputError(
                "the order in which a forward gathers banks is not known, because layers share bank "
                f"{shared.name}, and {reason}",
                name=shared.name,
            )
        default = [(bank.index, 0, bank.format.link_bytes) for bank in banks]
        requests = [request for run in runs for request in run] or default
        for gather in [self._copies.submit(self._gather_now(request, None)) for request in requests]:
            gather.wait()

    def _gather_now(self, request: Request, memory: torch.Tensor | None) -> SlotCopy:
        """Return a gather outside of a ring, into `memory`. With None, this rank sends and receives nothing."""
        action = self._gather(request)
        if memory is None:
            action, nothing = dataclasses.replace(action, receives=False), action.own.memory[:0]
            return SlotCopy(action.sources, nothing, action.label, action, self._lane)
        # Work issued so far may still use `memory`, which was allocated just now.
        after = self._lane.mark_computation()
        return SlotCopy(action.sources, memory, action.label, action, self._lane, after)

    @property
    def _lane(self) -> Lane:
        return HOST_LANE

    def _gather(self, request: Request, into_slot: Sequence[Source] | None = None) -> GatherAction:
        """Return a gather into a slot, to which all ranks' shards go as `into_slot`, or by default into a buffer."""
        assert self._group is not None, "connect comes first"
        bank, sources = self._banks[request[0]]
        start, stop = request[1:]
        clipped = [source.with_pieces(clip_pieces(source.pieces, start, stop)) for source in sources]
        own = clipped[self._group.rank]
        assert isinstance(own, MemorySource), "a rank sends from memory"
        return GatherAction(self._group, request, own, tuple(into_slot or clipped), bank.name, self._plan)

    def _learn(self, request: Request) -> None:
        # The request may have begun a shorter run that is contained in this one.
        self._runs.pop(request, None)
        run = [] if self._run is None else self._run
        run.append(request)
        self._runs[run[0]] = run


class DeviceCollectiveTransport(CollectiveTransport):
    """The collective transport into the memory of `device`, which has an index. `connect` connects the devices."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        connect: Callable[[Rendezvous, torch.device], NcclLinks] = NcclLinks,
    ) -> None:
        super().__init__(link)
        self._device, self._connect = device, connect

    def _make_group(self, rendezvous: Rendezvous, describe: Callable[[Request], str]) -> GatherGroup:
        return DeviceGatherGroup(rendezvous, describe, self._device, self._connect)

    @functools.cached_property
    def _lane(self) -> Lane:
        return StreamLane(self._device)


def _is_forward(runs: Sequence[Sequence[Request]], banks: Set[int]) -> bool:
    """Return whether a single run gathers all `banks`. Runs with the same first bank are recorded only once."""
    return len(runs) == 1 and len(runs[0]) > 1 and {bank for bank, _, _ in runs[0]} == banks


# A method would keep the transport alive, and its connections must close as soon as it is freed.
def _describe(banks: Mapping[int, tuple[BankSpec, object]], request: Request) -> str:
    index, start, stop = request
    if index not in banks:
        return f"bank number {index}, which this rank does not have"
    bank = banks[index][0]
    return (
        f"bank {bank.name}"
        if (start, stop) == (0, bank.format.link_bytes)
        else f"bytes {start} to {stop} of {bank.name}"
    )
