"""Times transfers into a slot as a ring makes them: by a copy thread on a CPU, on a copy stream on a GPU.

host    from this process's host memory
local   from memory of the compute device itself, as for this rank's own shard
peer    from other ranks: their shared memory on a CPU, memory of their devices on a GPU

Also measures how much copies slow down computation, and computation slows down copies.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.distributed_c10d import Store

from moepass.passes.ir.shards import Piece
from moepass.runtime.calibrate.experiments import (
    CalibrationSizes,
    Experiment,
    Timing,
    TimingEffort,
    time_calls,
    timing_of,
)
from moepass.runtime.calibrate.measure_compute import TORCH_DTYPES
from moepass.runtime.ranks.rendezvous import Rendezvous
from moepass.runtime.system.shared_memory import SegmentAddress, create_segment, open_segment
from moepass.runtime.transfer.copying import CopyThread, SlotCopy
from moepass.runtime.transfer.lanes import HOST_LANE, StreamLane, finish_on
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource

_MEET_SECONDS = 120.0
# Copies that run while computation is timed; together they take much longer than one call.
_COPIES = 4
# [Empirical] Computation between two checks of the copies, long enough to run at full speed.
_PIECE_SECONDS = 0.002


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
    is_gpu = device.type == "cuda"
    benches = {"host": TransferBench([torch.ones(nbytes, dtype=torch.uint8, pin_memory=is_gpu)], slot)}
    benches["local"] = benches["host"]
    if is_gpu:
        benches["local"] = TransferBench([torch.ones(nbytes, dtype=torch.uint8, device=device)], slot)
        if ranks > 1:
            # This process allocates memory on the devices of its peers, which is as far away as the peers' memory.
            devices = [torch.device("cuda", (rank + step) % ranks) for step in range(1, ranks)]
            share = -(-nbytes // len(devices))
            memory = [torch.ones(share, dtype=torch.uint8, device=peer) for peer in devices]
            benches["peer"] = TransferBench(memory, slot)
        finish_on(device)
    elif ranks > 1:
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


def transfer_experiments(
    sizes: CalibrationSizes, device: torch.device, benches: dict[str, TransferBench]
) -> list[Experiment]:
    """Return the experiments `host`, `local` and `peer`; without `local` if it is the same bench as `host`."""

    def measure(bench: TransferBench, bytes: int) -> Timing:
        # All ranks make the same number of calls, so that they load each other's memory for equally long.
        calls = min(64, max(1, sizes.transfer_bytes[-1] // bytes // 8))
        return time_calls(lambda: bench.wait(bench.start(bytes)), device, sizes.effort, calls)

    return [
        Experiment(name, {"bytes": sizes.transfer_bytes}, functools.partial(measure, bench))
        for name, bench in benches.items()
        if name == "host" or bench is not benches["host"]
    ]


def measure_overlap(bench: TransferBench, sizes: CalibrationSizes, device: torch.device) -> dict[str, Timing]:
    """Return slowdowns, at least 1: of "gemm" and "memory" (traffic) during copies, and of "copy" during GEMMs.

    Each part is measured alone and overlapped in turn, so that drift of the machine affects both measurements.
    """
    gemms = _gemms(sizes, device)
    elements = max(1, min(sizes.memory_bytes[-1], 48 << 20) // 12)
    left, right, result = (torch.ones(elements, device=device) for _ in range(3))
    gemm, copy = _measure_together(gemms, bench, sizes, device)
    memory, _ = _measure_together(lambda: torch.add(left, right, out=result), bench, sizes, device)
    return {"gemm": gemm, "memory": memory, "copy": copy}


def _gemms(sizes: CalibrationSizes, device: torch.device) -> Callable[[], object]:
    dtype = TORCH_DTYPES[sizes.dtypes[0]]
    width, rows = sizes.widths[-1], sizes.rows[-1]
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, width), (width, width)))
    # Few rows, so that one GEMM ends soon.
    once = time_calls(lambda: left @ right, device, TimingEffort(1, 0.0, 0.0)).seconds
    few_rows = left[: max(1, min(rows, int(rows * _PIECE_SECONDS / once)))]
    return lambda: few_rows @ right


def _measure_together(
    work: Callable[[], object], bench: TransferBench, sizes: CalibrationSizes, device: torch.device
) -> tuple[Timing, Timing]:
    """Return the slowdown of `work` during copies, and of the copies during `work`."""
    nbytes = min(bench.slot.numel(), sum(source.numel() for source in bench.sources))
    works: list[float] = []
    copies: list[float] = []
    bench.wait(bench.start(nbytes))
    for _ in range(sizes.effort.samples):
        copy_alone = _copies(bench, nbytes, None, device)[0]
        work_alone = time_calls(work, device, TimingEffort(1, copy_alone)).seconds
        together, pieces = _copies(bench, nbytes, work, device)
        works.append(together / pieces / work_alone)
        copies.append(together / copy_alone)
    of_work, of_copies = timing_of(works), timing_of(copies)
    return Timing(max(1.0, of_work.seconds), of_work.spread), Timing(max(1.0, of_copies.seconds), of_copies.spread)


def _copies(
    bench: TransferBench, nbytes: int, work: Callable[[], object] | None, device: torch.device
) -> tuple[float, int]:
    """Return the seconds that some copies take, and how many times `work` ran in that time (at least 1)."""
    started = time.perf_counter()
    copies = [bench.start(nbytes) for _ in range(_COPIES)]
    pieces = 0
    if work is None:
        bench.wait(copies[-1])
    else:
        while not bench.is_done(copies[-1]):
            work()
            if device.type == "cuda":  # waits for the current stream alone, not for copies on other streams
                torch.cuda.current_stream(device).synchronize()
            pieces += 1
    return time.perf_counter() - started, max(1, pieces)
