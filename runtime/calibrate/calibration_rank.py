"""One rank of a calibration, as a process.

It reads its task from standard input as JSON. It writes JSON to standard output: one line before each point, and one
line with all measurements at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from moepass.models.reference.collectives import exchange_rows, gather_rows, scatter_sums, sum_over_ranks
from moepass.runtime.calibrate.experiments import CalibrationSizes, Experiment, Timing, time_calls
from moepass.runtime.calibrate.measure_compute import compute_experiments
from moepass.runtime.calibrate.measure_transfers import measure_overlap, open_benches, transfer_experiments
from moepass.runtime.system.device_names import device_name
from moepass.runtime.torch_private import default_group, store_of

# Collectives: bytes of a number, and the calls of a timing.
_VALUE_BYTES = 4
_MOST_CALLS = 16
_CALL_BYTES = 4 << 20

# Called with the number of points done, the number of all points, and the name of the next experiment.
Report = Callable[[int, int, str], object]


@dataclasses.dataclass(frozen=True)
class RankTask:
    """The task of one rank: `store` is the file where ranks meet; the process stays on `cores` (all if empty)."""

    rank: int
    ranks: int
    device: str
    threads: int
    store: str
    sizes: CalibrationSizes
    cores: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """The timings of one experiment, over the product of its axes, the last axis fastest."""

    axes: dict[str, tuple[int, ...]]
    timings: tuple[Timing, ...]


@dataclasses.dataclass(frozen=True)
class RankMeasurements:
    """Everything that one rank measured.

    Attributes:
        memory_bytes: Memory of the device; for a CPU, the machine's memory.
        overlap: Slowdowns; see `measure_overlap`.
        local_is_host: Whether copies inside the device's memory are the same as copies from the host.
        core_share: The share of the time in which a single computing thread had a core. None for several threads,
            and on a GPU.
    """

    device: str
    memory_bytes: int
    tables: dict[str, Measured]
    overlap: dict[str, Timing]
    local_is_host: bool
    core_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Message:
    """A line of standard output: progress with the name of the next experiment, or all measurements at the end."""

    done: int = 0
    total: int = 0
    what: str = ""
    measurements: RankMeasurements | None = None


def measure_rank(sizes: CalibrationSizes, device: torch.device, report: Report) -> RankMeasurements:
    """Measure the machine as one rank, in step with the other ranks of torch.distributed if it is initialised.

    All ranks measure the same at the same time, because they also compute at the same time. Raises any error of the
    measured operations.
    """
    grouped = dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    store = store_of(default_group()) if grouped else None
    with torch.inference_mode(), open_benches(sizes, device, store, rank, ranks) as benches:
        experiments = [*transfer_experiments(sizes, device, benches), *compute_experiments(sizes, device)]
        if grouped:
            experiments += collective_experiments(sizes, device, default_group().group_name)
        total = sum(len(experiment.sizes()) for experiment in experiments) + 1
        tables: dict[str, Measured] = {}
        clock = _CoreClock()
        done = 0
        for experiment in experiments:
            timings = []
            for sizes_of_point in experiment.sizes():
                report(done, total, experiment.name)
                if grouped:
                    dist.barrier()
                with clock if experiment.is_computation else contextlib.nullcontext():
                    timings.append(experiment.time(**sizes_of_point))
                done += 1
            tables[experiment.name] = Measured(experiment.axes, tuple(timings))
        report(done, total, "overlap")
        if grouped:
            dist.barrier()
        overlap = measure_overlap(benches.get("peer", benches["host"]), sizes, device)
        if grouped:
            dist.barrier()  # keeps the memory of all ranks until no rank reads it
        report(total, total, "done")
        share = clock.share if device.type == "cpu" and torch.get_num_threads() == 1 else None
        memory_bytes = psutil.virtual_memory().total
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        local_is_host = benches["local"] is benches["host"]
        return RankMeasurements(device_name(device), memory_bytes, tables, overlap, local_is_host, share)


class _CoreClock:
    """A context manager that adds up the CPU time of this thread and the elapsed time."""

    def __init__(self) -> None:
        self._computed = self._took = 0.0

    def __enter__(self) -> None:
        self._started = time.thread_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._computed += time.thread_time() - self._started[0]
        self._took += time.perf_counter() - self._started[1]

    @property
    def share(self) -> float:
        """The CPU time divided by the elapsed time, at most 1."""
        return min(1.0, self._computed / self._took)


def collective_experiments(sizes: CalibrationSizes, device: torch.device, group_name: str) -> list[Experiment]:
    """Return `collective.KIND` for each of `passes.machine.hardware.COLLECTIVES`, on the default process group.

    All ranks run them together. `bank_gather` is measured over gloo alone.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def calls(nbytes: int) -> dict[str, Callable[[], object]]:
        values = torch.ones(ranks * max(1, nbytes // _VALUE_BYTES // ranks), device=device)
        shards = values.chunk(ranks)
        counts = [values.numel() // ranks] * ranks
        return {
            "all_to_all": lambda: exchange_rows(values, counts, counts, group_name),
            "all_gather": lambda: gather_rows(shards[rank], ranks, group_name),
            "reduce_scatter": lambda: scatter_sums(values, ranks, group_name),
            "all_reduce": lambda: sum_over_ranks(values, group_name),
            "p2p": lambda: _there_and_back(values, rank, ranks),
            "bank_gather": lambda: _gather_into(shards, rank),
        }

    def measure(kind: str, bytes: int) -> Timing:
        count = min(_MOST_CALLS, max(1, _CALL_BYTES // bytes))  # the same number on every rank
        timing = time_calls(calls(bytes)[kind], device, sizes.effort, count)
        return Timing(timing.seconds / 2, timing.spread) if kind == "p2p" else timing

    return [
        Experiment(f"collective.{kind}", {"bytes": sizes.collective_bytes}, functools.partial(measure, kind))
        for kind in calls(1)
        if kind != "bank_gather" or device.type == "cpu"
    ]


def _there_and_back(message: torch.Tensor, rank: int, ranks: int) -> None:
    """Exchange a message with the neighbour; the last of an odd number of ranks has no neighbour and does nothing."""
    neighbour = rank ^ 1
    if neighbour >= ranks:
        return
    if rank < neighbour:
        dist.send(message, neighbour)
        dist.recv(message, neighbour)
    else:
        dist.recv(message, neighbour)
        dist.send(message, neighbour)


def _gather_into(shards: tuple[torch.Tensor, ...], rank: int) -> None:
    """Send this rank's shard to all ranks and receive theirs, as `GatherGroup.exchange` does."""
    peers = [(rank + step) % len(shards) for step in range(1, len(shards))]
    works = [work for peer in peers for work in (dist.irecv(shards[peer], peer), dist.isend(shards[rank], peer))]
    for work in works:
        assert work is not None  # None is for ranks outside of the group
        work.wait()


def run_rank(task: RankTask, report: Report) -> RankMeasurements:
    """Turn this process into a rank, with its threads, cores and process group, and return its measurements."""
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if task.ranks == 1:
        return measure_rank(task.sizes, device, report)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{task.store}",
        rank=task.rank,
        world_size=task.ranks,
        **options,
    )
    try:
        return measure_rank(task.sizes, device, report)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Run the task that standard input describes."""
    # Output of libraries must not mix with the messages.
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: Message) -> None:
        messages.write(msgspec.json.encode(message) + b"\n")

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=RankTask)
    measurements = run_rank(task, lambda done, total, what: send(Message(done, total, what)))
    send(Message(measurements=measurements))


if __name__ == "__main__":
    main()
