"""Times transfers into a slot as a ring makes them: by a copy thread on a CPU, on a copy stream on a GPU.

host    from this process's host memory
local   from memory of the compute device itself, as for this rank's own shard
peer    from other ranks: their shared memory on a CPU, memory of their devices on a GPU
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from moepass.passes.ir.shards import Piece
from moepass.runtime.calibrate.experiments import CalibrationSizes, Experiment
from moepass.runtime.calibrate.stopwatch import Timing, synchronise, time_calls
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.shared_memory import SegmentAddress, create_segment, open_segment
from moepass.runtime.transfer.copying import CopyThread, SlotCopy
from moepass.runtime.transfer.lanes import HOST_LANE, StreamLane
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource

_MEET_SECONDS = 120.0


class TransferBench:
    """Copies bytes from `sources` (flat uint8) into `slot`, in equal shares, by the lane and thread of a ring.

    Successive copies read from successive offsets of the sources, so that their bytes do not come from a cache.
    """

    def __init__(self, sources: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        self.sources = tuple(sources)
        self.slot = slot
        self._offset = 0
        self._lane = HOST_LANE if slot.device.type == "cpu" else StreamLane(slot.device)
        self._thread = CopyThread(Link()) if slot.device.type == "cpu" else None

    @property
    def largest_bytes(self) -> int:
        """The largest number of bytes that one copy can transfer."""
        return min(self.slot.numel(), sum(source.numel() for source in self.sources))

    def start(self, nbytes: int) -> SlotCopy:
        """Begin a copy of `nbytes` behind those that were begun before, and return it."""
        copy = SlotCopy(self._next_sources(nbytes), self.slot, "of a calibration", lane=self._lane)
        if self._thread is not None:
            return self._thread.submit(copy)
        copy.perform(Link())
        copy.finished.set()
        return copy

    def _next_sources(self, nbytes: int) -> list[MemorySource]:
        sources: list[MemorySource] = []
        share = -(-nbytes // len(self.sources))
        for index, source in enumerate(self.sources):
            size = min(share, nbytes - index * share)
            if size > 0:
                start = self._offset if self._offset + size <= source.numel() else 0
                sources.append(MemorySource(source, (Piece(start, index * share, size),)))
        self._offset = (self._offset + share) % max(source.numel() for source in self.sources)
        return sources

    def is_done(self, copy: SlotCopy) -> bool:
        """Return whether all bytes of `copy` are in the slot."""
        return copy.finished.is_set() and self._lane.has_passed(copy.filled)

    def wait(self, copy: SlotCopy) -> None:
        """Block until all bytes of `copy` are in the slot. Raises CopyError if it failed."""
        copy.wait()
        copy.end()


@contextlib.contextmanager
def open_benches(
    sizes: CalibrationSizes, device: torch.device, store: Store | None, rank: int, ranks: int
) -> Iterator[dict[str, TransferBench]]:
    """Yield the benches of this machine by name: `host` and `local`, and `peer` if there are several ranks.

    On a CPU, `local` is the bench `host`, because device and host memory are one. All ranks call this together; the
    memory exists until all of them have left the block. Raises PeerError if a rank does not respond.
    """
    nbytes = max(sizes.transfer_bytes)
    slot = torch.empty(nbytes, dtype=torch.uint8, device=device)
    slot.zero_()  # allocates its pages before the first copy
    if device.type == "cuda":
        benches = _device_benches(nbytes, slot, device, rank, ranks)
        synchronise(device)
        yield benches
        return
    host_memory = torch.ones(nbytes, dtype=torch.uint8)
    benches = {"host": TransferBench([host_memory], slot)}
    benches["local"] = benches["host"]
    if ranks == 1:
        yield benches
        return
    assert store is not None
    meeting = Rendezvous(store, rank, ranks, _MEET_SECONDS, "all ranks calibrate together")
    segment = create_segment(nbytes, "moepass-calibration")
    shared = segment.map(0, nbytes)
    shared.fill_(1)
    with meeting.publishing_failures():
        addresses = meeting.exchange("segment", segment.address(), SegmentAddress)
        peers = [open_segment(address) for peer, address in addresses if peer != rank]
        benches["peer"] = TransferBench([peer.map(0, peer.nbytes) for peer in peers], slot)
        deque(meeting.exchange("note that all is mapped", True, bool), maxlen=0)
    yield benches


def _device_benches(
    nbytes: int, slot: torch.Tensor, device: torch.device, rank: int, ranks: int
) -> dict[str, TransferBench]:
    benches = {
        "host": TransferBench([torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)], slot),
        "local": TransferBench([torch.ones(nbytes, dtype=torch.uint8, device=device)], slot),
    }
    if ranks > 1:
        # This process allocates memory on the devices of its peers, which is as far away as the peers' memory.
        peers = [torch.device("cuda", (rank + step) % ranks) for step in range(1, ranks)]
        share = -(-nbytes // len(peers))
        benches["peer"] = TransferBench([torch.ones(share, dtype=torch.uint8, device=peer) for peer in peers], slot)
    return benches


def transfer_experiments(
    sizes: CalibrationSizes, device: torch.device, benches: dict[str, TransferBench]
) -> list[Experiment]:
    """Return the experiments `host`, `local` and `peer`; without `local` if it is the same bench as `host`."""
    distinct = {name: bench for name, bench in benches.items() if name == "host" or bench is not benches["host"]}
    return [
        Experiment(name, {"bytes": sizes.transfer_bytes}, _time_transfers(bench, sizes, device))
        for name, bench in distinct.items()
    ]


def _time_transfers(bench: TransferBench, sizes: CalibrationSizes, device: torch.device) -> Callable[..., Timing]:
    def measure(bytes: int) -> Timing:
        # All ranks make the same number of calls, so that they load each other's memory for equally long.
        calls = min(64, max(1, sizes.transfer_bytes[-1] // bytes // 8))
        return time_calls(lambda: bench.wait(bench.start(bytes)), device, sizes.effort, calls)

    return measure
