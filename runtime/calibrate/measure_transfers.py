"""Timing transfers into a slot, by the means that rings use: a copy thread on a CPU, a copy stream on a GPU.

    host    from this process's host memory
    local   from memory of the compute device itself, which this rank's own shard lies in
    peer    from other ranks: their shared memory on a CPU, their devices' memory on a GPU

Sources are read in turn from all over their memory, so that they do not come from a cache.
"""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from moepass.passes.ir.shards import Piece
from moepass.runtime.calibrate.experiments import Experiment, Sizes
from moepass.runtime.calibrate.stopwatch import Timing, synchronise, time_calls
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.shared_memory import SegmentAddress, create_segment, open_segment
from moepass.runtime.transfer.copying import CopyThread, PendingCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource, Source

_MEET_SECONDS = 120.0


class Lane(abc.ABC):
    """Copies `nbytes`, the same part from each of `sources` (flat uint8), into a slot, in the background."""

    def __init__(self, sources: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        self.sources = tuple(sources)
        self.slot = slot
        self._offset = 0

    @property
    def largest_bytes(self) -> int:
        return min(self.slot.numel(), sum(source.numel() for source in self.sources))

    def start(self, nbytes: int) -> object:
        """Begin a copy behind those that were begun before; gives what `is_done` and `wait` take."""
        parts = self._parts(nbytes)
        return self._start(parts)

    def _parts(self, nbytes: int) -> list[tuple[torch.Tensor, Piece]]:
        parts: list[tuple[torch.Tensor, Piece]] = []
        share = -(-nbytes // len(self.sources))
        for number, source in enumerate(self.sources):
            size = min(share, nbytes - number * share)
            if size > 0:
                start = self._offset if self._offset + size <= source.numel() else 0
                parts.append((source, Piece(start, number * share, size)))
        self._offset = (self._offset + share) % max(source.numel() for source in self.sources)
        return parts

    @abc.abstractmethod
    def _start(self, parts: Sequence[tuple[torch.Tensor, Piece]]) -> object: ...

    @abc.abstractmethod
    def is_done(self, copy: object) -> bool: ...

    @abc.abstractmethod
    def wait(self, copy: object) -> None: ...


class ThreadLane(Lane):
    """On a CPU."""

    def __init__(self, sources: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        super().__init__(sources, slot)
        self._thread = CopyThread(Link())

    def _start(self, parts: Sequence[tuple[torch.Tensor, Piece]]) -> PendingCopy:
        sources: list[Source] = [MemorySource(source, (piece,)) for source, piece in parts]
        return self._thread.submit(PendingCopy(sources, self.slot, "of a calibration"))

    def is_done(self, copy: object) -> bool:
        assert isinstance(copy, PendingCopy)
        return copy.finished.is_set()

    def wait(self, copy: object) -> None:
        assert isinstance(copy, PendingCopy)
        copy.wait()


class StreamLane(Lane):
    """On a GPU."""

    def __init__(self, sources: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        super().__init__(sources, slot)
        self._stream = torch.cuda.Stream(slot.device)

    def _start(self, parts: Sequence[tuple[torch.Tensor, Piece]]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            for source, piece in parts:
                target = self.slot.narrow(0, piece.slot_offset_bytes, piece.nbytes)
                target.copy_(source.narrow(0, piece.source_offset_bytes, piece.nbytes), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def is_done(self, copy: object) -> bool:
        assert isinstance(copy, torch.cuda.Event)
        return bool(copy.query())

    def wait(self, copy: object) -> None:
        assert isinstance(copy, torch.cuda.Event)
        copy.synchronize()


@contextlib.contextmanager
def open_lanes(
    sizes: Sizes, device: torch.device, store: Store | None, rank: int, ranks: int
) -> Iterator[dict[str, Lane]]:
    """The lanes that this machine has, by name: `host` and `local`, and `peer` where there are several ranks.

    On a CPU device and host memory are one, so `local` is what `host` is. Every rank calls this together; the memory is
    there until all have left it. Raises PeerError where a rank does not come.
    """
    nbytes = max(sizes.transfer_bytes)
    slot = torch.empty(nbytes, dtype=torch.uint8, device=device)
    slot.zero_()  # its pages are there before the first copy
    if device.type == "cuda":
        lanes = _stream_lanes(nbytes, slot, device, rank, ranks)
        synchronise(device)
        yield lanes
        return
    own = torch.ones(nbytes, dtype=torch.uint8)
    lanes = {"host": ThreadLane([own], slot)}
    lanes["local"] = lanes["host"]
    if ranks == 1:
        yield lanes
        return
    assert store is not None
    meeting = Rendezvous(store, rank, ranks, _MEET_SECONDS, "all ranks calibrate together")
    segment = create_segment(nbytes, "moepass-calibration")
    shared = segment.map(0, nbytes)
    shared.fill_(1)
    with meeting.telling_failures():
        addresses = meeting.exchange("segment", segment.address(), SegmentAddress)
        others = [open_segment(address) for other, address in addresses if other != rank]
        lanes["peer"] = ThreadLane([other.map(0, other.nbytes) for other in others], slot)
        deque(meeting.exchange("note that all is mapped", True, bool), maxlen=0)
    yield lanes


def _stream_lanes(nbytes: int, slot: torch.Tensor, device: torch.device, rank: int, ranks: int) -> dict[str, Lane]:
    lanes: dict[str, Lane] = {
        "host": StreamLane([torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)], slot),
        "local": StreamLane([torch.ones(nbytes, dtype=torch.uint8, device=device)], slot),
    }
    if ranks > 1:
        # Memory of other devices that this process takes for itself is as far away as theirs.
        others = [torch.device("cuda", (rank + step) % ranks) for step in range(1, ranks)]
        part = -(-nbytes // len(others))
        lanes["peer"] = StreamLane([torch.ones(part, dtype=torch.uint8, device=other) for other in others], slot)
    return lanes


def transfer_experiments(sizes: Sizes, device: torch.device, lanes: dict[str, Lane]) -> list[Experiment]:
    """`host`, `local` and `peer`, as far as there are lanes; those that are one lane are timed once, as `host`."""
    different = {name: lane for name, lane in lanes.items() if name == "host" or lane is not lanes["host"]}
    return [
        Experiment(name, {"bytes": sizes.transfer_bytes}, _Transfer(lane, sizes, device))
        for name, lane in different.items()
    ]


class _Transfer:
    def __init__(self, lane: Lane, sizes: Sizes, device: torch.device) -> None:
        self.lane, self.sizes, self.device = lane, sizes, device

    def __call__(self, bytes: int) -> Timing:
        # As many calls on every rank, so that they load each other's memory for equally long.
        calls = min(64, max(1, self.sizes.transfer_bytes[-1] // bytes // 8))
        return time_calls(lambda: self.lane.wait(self.lane.start(bytes)), self.device, self.sizes.effort, calls)
