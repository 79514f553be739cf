"""One rank of a calibration, a process of its own: reads what to measure from standard input, as JSON.

It writes JSON to standard output, a line for each point that it has measured and one with everything at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from moepass.runtime.calibrate.experiments import Sizes
from moepass.runtime.calibrate.measure_collectives import collective_experiments
from moepass.runtime.calibrate.measure_compute import compute_experiments
from moepass.runtime.calibrate.measure_overlap import measure_overlap
from moepass.runtime.calibrate.measure_transfers import open_lanes, transfer_experiments
from moepass.runtime.calibrate.stopwatch import Timing
from moepass.runtime.system.device_names import device_name
from moepass.runtime.torch_private import default_group, store_of

# Takes (points done, points in all, what comes next).
Report = Callable[[int, int, str], object]


@dataclasses.dataclass(frozen=True)
class RankTask:
    """The task of one rank. Ranks find each other through the file `store`; `cores` are those to stay on, if any."""

    rank: int
    ranks: int
    device: str
    threads: int
    store: str
    sizes: Sizes
    cores: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Measured:
    """The timings of one experiment, over the product of its axes, the last axis fastest."""

    axes: dict[str, tuple[int, ...]]
    timings: tuple[Timing, ...]


@dataclasses.dataclass(frozen=True)
class RankMeasurements:
    """Everything that one rank measured: experiments by name, and ratios (see `measure_overlap`).

    `core_share` is how much of the time a single computing thread had a core; None for more threads, and for a GPU.
    `local_is_host`: copies inside the device's memory are what copies from the host are.
    """

    device: str
    memory_bytes: int
    tables: dict[str, Measured]
    overlap: dict[str, Timing]
    local_is_host: bool
    core_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Message:
    """A line of standard output: a step of progress, or everything at the end."""

    done: int = 0
    total: int = 0
    what: str = ""
    measurements: RankMeasurements | None = None


def measure_rank(sizes: Sizes, device: torch.device, report: Report) -> RankMeasurements:
    """Measure this process's part of the machine, in step with the other ranks of torch.distributed, if there are any.

    All ranks measure the same at the same time, as they will compute. Raises what the measured operations raise.
    """
    grouped = dist.is_initialized() and dist.get_world_size() > 1
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    store = store_of(default_group()) if grouped else None
    with torch.inference_mode(), open_lanes(sizes, device, store, rank, ranks) as lanes:
        experiments = [*transfer_experiments(sizes, device, lanes), *compute_experiments(sizes, device)]
        if grouped:
            experiments += collective_experiments(sizes, device, default_group().group_name)
        total = sum(experiment.points for experiment in experiments) + 1
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
        overlap = measure_overlap(lanes.get("peer", lanes["host"]), sizes, device)
        if grouped:
            dist.barrier()  # nobody's memory goes while others read it
        report(total, total, "done")
        share = clock.share if device.type == "cpu" and torch.get_num_threads() == 1 else None
        return RankMeasurements(*_describe(device), tables, overlap, lanes["local"] is lanes["host"], share)


class _CoreClock:
    """Adds up how long this thread computed, and how long that took."""

    def __init__(self) -> None:
        self._computed = self._took = 0.0

    def __enter__(self) -> None:
        self._started = time.thread_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._computed += time.thread_time() - self._started[0]
        self._took += time.perf_counter() - self._started[1]

    @property
    def share(self) -> float:
        return min(1.0, self._computed / self._took)


def machine_memory_bytes() -> int:
    """Bytes of the host's memory."""
    total: int = psutil.virtual_memory().total
    return total


def _describe(device: torch.device) -> tuple[str, int]:
    """The device's name, and the bytes of its memory; of a CPU all that the machine has."""
    if device.type == "cuda":
        return device_name(device), int(torch.cuda.get_device_properties(device).total_memory)
    return device_name(device), machine_memory_bytes()


def run_rank(task: RankTask, report: Report) -> RankMeasurements:
    """`measure_rank` in this process, which becomes a rank for it: its threads, its cores, its group."""
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
