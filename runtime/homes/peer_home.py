"""Home `peer`: every rank stores 1/N of each bank in shared memory, or with `collective` in private memory."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from moepass.models.checkpoint.unread_tensors import UnreadTensor
from moepass.models.formulas.expert_placement import shard_bounds
from moepass.models.homes import PULL
from moepass.passes.ir.plan import BankSpec, TensorSpec
from moepass.passes.ir.shards import ShardLayout, expert_range, parameter_places, shard_layout, shard_pieces
from moepass.runtime.banks.banks import Bank, describe_bank, resting_tensors, write_parts
from moepass.runtime.banks.mutation_guard import sample_of
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedSegment, in_pages
from moepass.runtime.system.tensor_memory import are_only_users
from moepass.runtime.transfer.home_protocol import Home, Transport
from moepass.runtime.transfer.lanes import finish_on
from moepass.runtime.transfer.sources import MemorySource, RemoteSource, Source

_PULL = Transport(PULL)


class PeerHome(Home):
    """Shards on all ranks of a group."""

    def __init__(self, group: PeerGroup, transport: Transport) -> None:
        self.group = group
        self.transport = transport
        # The shards of each bank, by its index, once the banks are complete.
        self.spread: dict[int, tuple[Source, ...]] = {}

    def check(self) -> None:
        """Raise PeerError if a rank has ended."""
        self.group.check_alive()

    def sources(self, bank: BankSpec, shards: Sequence[torch.Tensor]) -> tuple[Source, ...]:
        """Return the shards of all ranks. Raises PeerError if the ranks never connected them."""
        if bank.index not in self.spread:
            text = f"bank {bank.name} is not complete, because offload_experts failed; start all ranks again"
            raise PeerError(text, name=bank.name)
        return self.spread[bank.index]

    def rank_of(self, bank: BankSpec) -> int:
        """Return this process's rank in the group."""
        return self.group.rank


class PeerPacker:
    """A packer that spreads a model's banks over the ranks of `group`, so that each stores 1/N of every bank."""

    home_name = "peer"
    # Staging buffers of each rank; only home `hybrid` has staging buffers.
    staging_buffers = 0
    # The type of the devices that shards are on.
    device_type = "cpu"
    # Whether a write to parameters that `share_parts` moved changes them on this rank only.
    is_copied_on_write = True

    def __init__(self, group: PeerGroup, transport: Transport = _PULL) -> None:
        self.home = PeerHome(group, transport)
        self.group = group
        self._specs: list[BankSpec] = []
        self._segment: SharedSegment | None = None

    def agree(self, banks: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Check that all ranks have the same banks, given as tensors [experts, ...] by bank name. Changes nothing.

        Raises PeerError if ranks differ or are missing, and SharedMemoryError if the machine has no shared memory left.
        """
        specs = []
        for index, (name, tensors) in enumerate(banks.items()):
            bounds = shard_bounds(next(iter(tensors.values())).shape[0], self.group.size)
            specs.append(describe_bank(index, name, tensors, home=self.home_name, expert_bounds=bounds))
        self.agree_on(specs, [weights_digest(tensors) for tensors in banks.values()])

    def agree_on(self, specs: Sequence[BankSpec], digests: Sequence[str]) -> None:
        """Check that all ranks have these specs and digests, and allocate memory. Raises the errors of `agree`."""
        self._specs = list(specs)
        self.group.agree(self._specs, digests, self.staging_buffers, self.device_type)
        with self.group.rendezvous.publishing_failures():
            self._reserve()

    def pack(self, index: int, name: str, tensors: Mapping[str, torch.Tensor]) -> Bank:
        """Return bank `index` with this rank's experts in shared memory. It can be read after `connect`."""
        experts = expert_range(self._specs[index], self.group.rank)
        parts = [tensor.detach()[experts.start : experts.stop] for tensor in resting_tensors(tensors).values()]
        return self.pack_part(index, parts)

    def pack_part(self, index: int, parts: Sequence[torch.Tensor]) -> Bank:
        """Return bank `index`, packed from the parameters of this rank's shard, as `parameter_places` lists them."""
        spec, rank = self._specs[index], self.group.rank
        with self.group.rendezvous.publishing_failures():
            shard = self._memory(index)
            write_parts(spec, rank, parts, shard)
        return Bank(spec, shard)

    def share_parts(self, index: int, parts: Sequence[torch.Tensor], when_freed: Callable[[], None]) -> list[bool]:
        """Move `parts`, which were packed as bank `index`, into its shard, so that their bytes are in memory once.

        A parameter gets the shard as its storage. On a CPU the shard is mapped privately: a later write to the
        parameter is visible to this rank alone, as before, and other ranks still read the bytes that the ranks agreed
        on. The parameter stays the same object with the same shape, strides and version, so no guard of compiled code
        fails. No other thread may read `parts` during the call. `when_freed` is called once no parameter uses the shard
        any more, in any thread.

        Returns for each parameter whether it was moved. Raises SharedMemoryError if the shard cannot be mapped.
        """
        # The parameters after these are not in the shard; only recipes read them.
        count = len(self.parameters(index))
        movable = [number < count and is_movable(tensor, self.device_type) for number, tensor in enumerate(parts)]
        positions = [position for position, is_free in enumerate(movable) if is_free]
        if positions:
            with torch.inference_mode(False):  # the new tensors need a version
                shared = self._tensors_in_shard(index, positions, when_freed)
            for position, tensor in zip(positions, shared, strict=True):
                parts[position].data = tensor.view(parts[position].shape)
        return movable

    def _tensors_in_shard(
        self, index: int, positions: Sequence[int], when_freed: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Return parameters of this rank's shard as tensors in the shard's memory.

        Each has a separate storage, as savers of models expect. None may be empty. Calls `when_freed`, in any thread,
        once the last of the tensors is freed, or for each of them. Raises SharedMemoryError if the shard cannot be
        mapped.
        """
        assert self._segment is not None, "agree comes first"
        start = self._offsets(self.group.rank)[index]
        mapping = self._segment.map_privately(start, self.layout(index).nbytes)
        weakref.finalize(mapping, when_freed).atexit = False
        return [
            torch.frombuffer(mapping, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset_bytes)
            .view(spec.torch_dtype)
            .view(spec.shape)
            for spec in (self.parameters(index)[position] for position in positions)
        ]

    def layout(self, index: int) -> ShardLayout:
        """Return the layout of this rank's shard of bank `index`."""
        return shard_layout(self._specs[index], self.group.rank)

    def parameters(self, index: int) -> tuple[TensorSpec, ...]:
        """Return shape and offset of each parameter in this rank's shard of bank `index`."""
        return parameter_places(self._specs[index], self.group.rank)

    def connect(self, banks: Sequence[Bank]) -> None:
        """Complete `banks` with the shards of all other ranks. Raises PeerError if ranks have ended or are late."""
        self.home.spread = self.spread(banks)

    def _reserve(self) -> None:
        self._segment = self.group.make_segment(self._offsets(self.group.rank)[-1] - PAGE_BYTES)

    def _memory(self, index: int) -> torch.Tensor:
        """Return the memory of this rank's shard of bank `index`, flat uint8."""
        assert self._segment is not None, "agree comes first"
        return self._segment.map(self._offsets(self.group.rank)[index], self.layout(index).nbytes)

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """Return each bank's shards, by its index, once every rank has mapped them. Raises the errors of `connect`."""
        shards = {self.group.rank: [bank.shard for bank in banks]}
        for rank, segment in self.group.share().items():
            with self.group.rendezvous.publishing_failures():
                shards[rank] = self._open(rank, segment)
        self.group.settle()
        # Each rank starts with a different shard and ends with its own, so that not all read one shard at once.
        order = [(self.group.rank + 1 + step) % self.group.size for step in range(self.group.size)]
        return {
            spec.index: tuple(self._source(spec, rank, shards[rank][number]) for rank in order)
            for number, spec in enumerate(self._specs)
        }

    def _open(self, rank: int, segment: SharedSegment) -> list[torch.Tensor]:
        """Return the shards of another rank, bank by bank, from its `segment`."""
        layouts = [shard_layout(spec, rank) for spec in self._specs]
        return [segment.map(start, layout.nbytes) for start, layout in zip(self._offsets(rank), layouts, strict=False)]

    def _source(self, spec: BankSpec, rank: int, shard: torch.Tensor) -> Source:
        return MemorySource(shard, shard_pieces(spec, rank), over_link=rank != self.group.rank)

    def _offsets(self, rank: int) -> list[int]:
        """Return the offset of each bank's shard in the segment of `rank`, and then the end of the segment."""
        sizes = (in_pages(shard_layout(spec, rank).nbytes) for spec in self._specs)
        return list(itertools.accumulate(sizes, initial=PAGE_BYTES))


class GatherPacker(PeerPacker):
    """A packer for ranks that cannot read each other's memory: shards lie in memory of `device`."""

    def __init__(self, group: PeerGroup, transport: CollectiveTransport, device: torch.device) -> None:
        super().__init__(group, transport)
        self._collective, self._device = transport, device
        self.device_type = device.type

    def _reserve(self) -> None:
        return

    def _memory(self, index: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(self.layout(index).nbytes, dtype=torch.uint8, device=self._device)

    def spread(self, banks: Sequence[Bank]) -> dict[int, tuple[Source, ...]]:
        """Return the shards of each bank, by rank, once every rank can send its own. Raises the errors of `connect`."""
        spread: dict[int, tuple[Source, ...]] = {}
        for bank in banks:
            sources: list[Source] = [RemoteSource(shard_pieces(bank.spec, rank)) for rank in range(self.group.size)]
            own = self.group.rank
            sources[own] = MemorySource(bank.shard, sources[own].pieces, over_link=False)
            spread[bank.spec.index] = tuple(sources)
            self._collective.add(bank.spec, sources)
        # The streams that send shards do not wait for the streams that wrote them.
        finish_on(self._device)
        self.group.settle()
        self._collective.connect(self.group.rendezvous)
        return spread


def is_movable(tensor: torch.Tensor, device_type: str = "cpu") -> bool:
    """Return whether only `tensor` can reach its memory, and a shard on a `device_type` device can replace it."""
    if tensor.device.type != device_type or tensor.is_inference() or not tensor.is_contiguous():
        return False
    return are_only_users([tensor])


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of a sample from every expert; different checkpoints have different digests.

    For weights that are not read yet it covers only their recipes, because a rank does not read the experts of others.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors.values():
        if isinstance(tensor, UnreadTensor):
            digest.update(tensor.recipe.describe().encode())
            continue
        digest.update(sample_of(tensor).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
