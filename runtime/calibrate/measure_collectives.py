"""Times collectives between ranks: as graphs call them, and as transport `collective` gathers banks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moepass.models.reference.collectives import exchange_rows, gather_rows, scatter_sums, sum_over_ranks
from moepass.runtime.calibrate.experiments import CalibrationSizes, Experiment
from moepass.runtime.calibrate.stopwatch import Timing, time_calls

_VALUE_BYTES = 4
_MOST_CALLS = 16
_CALL_BYTES = 4 << 20


def collective_experiments(sizes: CalibrationSizes, device: torch.device, group_name: str) -> list[Experiment]:
    """Return `collective.KIND` for each of `passes.machine.hardware.COLLECTIVES`, on the default process group.

    All ranks run them together. `bank_gather` is measured over gloo alone.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def rows(nbytes: int, parts: int) -> torch.Tensor:
        return torch.ones(parts * max(1, nbytes // _VALUE_BYTES // parts), device=device)

    def all_to_all(nbytes: int) -> Callable[[], object]:
        sent = rows(nbytes, ranks)
        counts = [sent.numel() // ranks] * ranks
        return lambda: exchange_rows(sent, counts, counts, group_name)

    def all_gather(nbytes: int) -> Callable[[], object]:
        shard = rows(nbytes // ranks, 1)
        return lambda: gather_rows(shard, ranks, group_name)

    def reduce_scatter(nbytes: int) -> Callable[[], object]:
        addends = rows(nbytes, ranks)
        return lambda: scatter_sums(addends, ranks, group_name)

    def all_reduce(nbytes: int) -> Callable[[], object]:
        values = rows(nbytes, 1)
        return lambda: sum_over_ranks(values, group_name)

    def p2p(nbytes: int) -> Callable[[], object]:
        message = rows(nbytes, 1)
        return lambda: _there_and_back(message, rank, ranks)

    def bank_gather(nbytes: int) -> Callable[[], object]:
        bank = rows(nbytes, ranks)
        return lambda: _gather_into(bank.chunk(ranks), rank)

    kinds = {
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "p2p": p2p,
    }
    if device.type == "cpu":
        kinds["bank_gather"] = bank_gather
    return [
        Experiment(f"collective.{kind}", {"bytes": sizes.collective_bytes}, _timed(kind, prepare, sizes, device))
        for kind, prepare in kinds.items()
    ]


def _timed(
    kind: str, prepare: Callable[[int], Callable[[], object]], sizes: CalibrationSizes, device: torch.device
) -> Callable[..., Timing]:
    def measure(bytes: int) -> Timing:
        calls = min(_MOST_CALLS, max(1, _CALL_BYTES // bytes))  # the same number on every rank
        timing = time_calls(prepare(bytes), device, sizes.effort, calls)
        return Timing(timing.seconds / 2, timing.spread) if kind == "p2p" else timing

    return measure


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
