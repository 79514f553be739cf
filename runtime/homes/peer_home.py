"""Home `peer`: every rank keeps 1/N of each bank.

Transport `pull`: in shared memory, so that each copies what it lacks whenever it wants. Transport `collective`: in
memory of its own, of the host or of its device, from which it sends what the others lack when all gather.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.checkpoint.weight_recipes import recipe_digest
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec, TensorSpec
from moepass.passes.ir.shards import ShardLayout, expert_range, parameter_places, shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank, describe_bank, write_parts
from moepass.runtime.banks.mutation_guard import sample_of
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment, in_pages
from moepass.runtime.transfer.home_protocol import Home
from moepass.runtime.transfer.sources import MemorySource, RemoteSource, Source
from moepass.runtime.transfer.streams import finish_on
from moepass.runtime.transfer.transports import Transport

_PULL = Transport(PULL)


class PeerHome(Home):
    """Shards on all ranks of a group."""

    def __init__(self, group: PeerGroup, transport: Transport) -> None:
        self.group = group
        self.transport = transport
        self._spread: dict[int, tuple[Source, ...]] = {}

    def check(self) -> None:
        """Raises PeerError where a rank is gone."""
        self.group.check_alive()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """The shards of all ranks. Raises PeerError where they were never brought together."""
        if bank.index not in self._spread:
            raise PeerError(
                f"bank {bank.name} is not complete, because offload_experts failed; start all ranks again",
                name=bank.name,
            )
        return self._spread[bank.index]

    def rank_of(self, bank: BankSpec) -> int:
        return self.group.rank

    def connect(self, spread: Mapping[int, tuple[Source, ...]]) -> None:
        """Record that banks are complete: `spread` says by index where each of them lies."""
        self._spread = dict(spread)


class PeerPacker:
    """Spreads the banks of a model over the ranks of `group`: `agree`, then `pack` each bank, then `connect`."""

    home_name = "peer"
    # Staging buffers of each rank; only home `hybrid` has any.
    staging_buffers = 0
    # Where shards lie.
    device_type = "cpu"
    # Whether what somebody writes to `tensors_in_shard` is seen by this rank alone.
    is_copied_on_write = True

    def __init__(self, group: PeerGroup, transport: Transport = _PULL) -> None:
        self.home = PeerHome(group, transport)
        self.group = group
        self._specs: list[BankSpec] = []
        self._segment: SharedSegment | None = None

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Make sure that all ranks have the same banks, given as name and tensors [experts, ...]; changes nothing.

        Raises PeerError where ranks differ or are missing, SharedMemoryError where the machine has no shared memory.
        """
        specs: list[BankSpec] = []
        for index, (name, tensors) in enumerate(banks.items()):
            experts = next(iter(tensors.values())).shape[0]
            bounds = shard_bounds(experts, self.group.size)
            specs.append(describe_bank(index, name, tensors, home=self.home_name, expert_bounds=bounds))
        self.agree_on(specs, [weights_digest(tensors) for tensors in banks.values()])

    def agree_on(self, specs: Sequence[BankSpec], digests: Sequence[str]) -> None:
        """As `agree`, for banks that are described already; `digests` is a word for each that all ranks must share."""
        self._specs = list(specs)
        self.group.agree(self._specs, digests, self.staging_buffers, self.device_type)
        with self.group.rendezvous.telling_failures():
            self._reserve()

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Bank `index` with this rank's experts in shared memory; it cannot be read before `connect`."""
        experts = expert_range(self._specs[index], self.group.rank)
        return self.pack_part(index, [tensor.detach()[experts.start : experts.stop] for tensor in tensors.values()])

    def pack_part(self, index: int, parts: Sequence[torch.Tensor]) -> Bank:
        """As `pack`, from the parameters that this rank's shard is made of: see `parameter_places`."""
        spec, rank = self._specs[index], self.group.rank
        with self.group.rendezvous.telling_failures():
            shard = self._memory(index)
            write_parts(spec, rank, parts, shard)
        return Bank(spec, shard)

    def tensors_in_shard(
        self, index: int, positions: Sequence[int], when_freed: Callable[[], None]
    ) -> list[torch.Tensor]:
        """The parameters of this rank's shard of bank `index` at `positions`, where the shard lies.

        Each has a storage of its own, as savers of models expect; none may be empty. `when_freed` is called once the
        last is gone, or with each of them, in any thread. Raises SharedMemoryError where the shard cannot be mapped.
        """
        assert self._segment is not None, "agree comes first"
        place = self._places(self.group.rank)[index]
        mapping = self._segment.map_privately(place, self.layout(index).nbytes)
        weakref.finalize(mapping, when_freed).atexit = False
        return [
            torch.frombuffer(mapping, dtype=torch.uint8, count=part.nbytes, offset=part.offset_bytes)
            .view(part.torch_dtype)
            .view(part.shape)
            for part in (self.parameters(index)[position] for position in positions)
        ]

    def layout(self, index: int) -> ShardLayout:
        """The layout of this rank's shard of bank `index`."""
        return shard_layout(self._specs[index], self.group.rank)

    def parameters(self, index: int) -> tuple[TensorSpec, ...]:
        """The places of the parameters in this rank's shard of bank `index`."""
        return parameter_places(self._specs[index], self.group.rank)

    def connect(self, banks: Sequence[Bank]) -> None:
        """Make `banks` complete, by the shards of all other ranks. Raises PeerError where ranks are gone or late."""
        self.home.connect(self.spread(banks))

    def _reserve(self) -> None:
        """Make room for this rank's shards."""
        self._segment = self.group.make_segment(self._places(self.group.rank)[-1] - PAGE_BYTES)

    def _memory(self, index: int) -> torch.Tensor:
        """Room for this rank's shard of bank `index`, flat uint8."""
        assert self._segment is not None, "agree comes first"
        rank = self.group.rank
        return self._segment.map(self._places(rank)[index], shard_layout(self._specs[index], rank).nbytes)

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """Positions of the shards of each bank, by its index, once every rank has mapped them. Raises as `connect`."""
        shards = {self.group.rank: [bank.shard for bank in banks]}
        for rank, segment in self.group.share().items():
            with self.group.rendezvous.telling_failures():
                shards[rank] = self._open(rank, segment)
        self.group.settle()
        # Every rank begins at another one, so that no shard is read by all at once; its own comes last.
        order = [(self.group.rank + 1 + step) % self.group.size for step in range(self.group.size)]
        return {
            spec.index: tuple(self._source(spec, rank, shards[rank][number]) for rank in order)
            for number, spec in enumerate(self._specs)
        }

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        """The shards of another rank, bank by bank; `segment` is what that rank has made."""
        layouts = [shard_layout(spec, rank) for spec in self._specs]
        return [segment.map(place, at.nbytes) for place, at in zip(self._places(rank), layouts, strict=False)]

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        return MemorySource(shard, shard_pieces(spec, rank), over_link=rank != self.group.rank)

    def _places(self, rank: int) -> list[int]:
        """Where each bank's shard begins in the segment of `rank`, and after them the end of the segment."""
        places = [PAGE_BYTES]
        for spec in self._specs:
            places.append(places[-1] + in_pages(shard_layout(spec, rank).nbytes))
        return places


class GatherPacker(PeerPacker):
    """As `PeerPacker`, where ranks cannot read each other's memory: shards lie in memory of `device`."""

    def __init__(self, group: PeerGroup, transport: CollectiveTransport, device: torch.device) -> None:
        super().__init__(group, transport)
        self._collective, self._device = transport, device
        self.device_type = device.type

    def _reserve(self) -> None:
        return

    def _memory(self, index: int) -> torch.Tensor:
        nbytes = shard_layout(self._specs[index], self.group.rank).nbytes
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """The parts of all ranks by rank, once every rank is ready to send its own. Raises as `connect`."""
        spread: dict[int, tuple[Source, ...]] = {}
        for bank in banks:
            spread[bank.spec.index] = tuple(
                MemorySource(bank.shard, shard_pieces(bank.spec, rank), over_link=False)
                if rank == self.group.rank
                else RemoteSource(shard_pieces(bank.spec, rank))
                for rank in range(self.group.size)
            )
            self._collective.add(bank.spec, spread[bank.spec.index])
        # Streams that send shards do not wait for those that wrote them.
        finish_on(self._device)
        self.group.settle()
        self._collective.connect(self.group.rendezvous)
        return spread


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A word that is equal for equal weights, of a sample from every expert: different checkpoints differ in it.

    Of weights that are not read yet it says only what they are made of: a rank reads no experts of others.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors.values():
        if isinstance(tensor, UnreadTensor):
            digest.update(recipe_digest(tensor.recipe).encode())
            continue
        digest.update(sample_of(tensor).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
