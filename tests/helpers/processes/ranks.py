"""Run a function on several real processes that form one gloo group.

    results = run_ranks(3, function, argument)  # function(argument) on ranks 0, 1 and 2, and the results by rank

Processes are reused by the next call, because starting one costs more than most tests. The group is new each time.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Modules imported once, in the process that the ranks are forked from.
# Without those that the first compilation imports, every rank would import them again.
_PRELOADED = [
    "pytest",
    "hypothesis",
    "torch._dynamo.backends.common",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "functorch.compile",
    "moepass.backend",
    "tests.helpers.graphs.backend_helper",
    "tests.helpers.models.tiny",
    "tests.helpers.processes.adopted_stacks",
]
_START_SECONDS = 60.0
# The time for further ranks to report after one has failed, because the first failure is not always the cause.
_GRACE_SECONDS = 0.3


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time; the message names it and contains its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `function(*args)` on ranks 0..world_size-1, each a process with one thread, and return the results by rank.

    During the call torch.distributed is initialised with gloo, and Dynamo is empty. `function` must be importable:
    define it at the top level of a module. Arguments and results are pickled.

    Raises RankError as soon as one rank fails, or after `timeout` seconds; then all ranks are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            pickle.dumps((rank, world_size, str(Path(folder, "store")), timeout, function, args))
            for rank in range(world_size)
        ]
        try:
            return _pool.run(jobs, timeout)
        except BaseException:
            # Other ranks may wait for the failed rank forever.
            _pool.close()
            raise


class _Pool:
    """Processes that wait for jobs; job r of a run goes to process r."""

    def __init__(self) -> None:
        self.ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, jobs: list[bytes], timeout: float) -> list[Any]:
        while len(self.ranks) < len(jobs):
            self.ranks.append(_start())
        connections = [connection for _, connection in self.ranks[: len(jobs)]]
        for connection, job in zip(connections, jobs, strict=True):
            connection.send_bytes(job)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting := {c: r for r, c in enumerate(connections) if r not in results and r not in failures}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                succeeded, outcome = self._receive(rank)
                (results if succeeded else failures)[rank] = outcome
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if not ready:
                break
        if failures:
            raise RankError("\n".join(f"rank {rank} {failures[rank]}" for rank in sorted(failures)))
        if waiting:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s")
        return [results[rank] for rank in range(len(jobs))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Return (True, result) or (False, description of the failure)."""
        process, connection = self.ranks[rank]
        try:
            succeeded, outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process.join(1.0)
            return False, f"died with exit code {process.exitcode}"
        return succeeded, outcome

    def close(self, patience: float = 0.0) -> None:
        """End all processes. Idle ones end by themselves; those still running after `patience` seconds are killed."""
        for _, connection in self.ranks:
            connection.close()
        for process, _ in self.ranks:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        self.ranks.clear()


def _start() -> tuple[BaseProcess, Connection]:
    # A fork of a process that has imported torch starts quickly, and shares no threads with the test's process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(_START_SECONDS):
        process.kill()
        raise RankError(f"a rank's process did not start within {_START_SECONDS:g} s")
    ours.recv_bytes()
    return process, ours


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000)  # as in the process of the tests
    connection.send_bytes(b"ready")
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:  # the test's process is gone
            return
        connection.send_bytes(_answer(job))


def _answer(job: bytes) -> bytes:
    """Return (True, result) or (False, description of the failure), pickled."""
    try:
        rank, world_size, store, timeout, function, args = pickle.loads(job)
        torch._dynamo.reset()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        try:
            # A function without communication could leave the group while other ranks still connect to it.
            dist.barrier()
            return pickle.dumps((True, function(*args)))
        finally:
            dist.destroy_process_group()
    except BaseException:
        return pickle.dumps((False, f"raised\n{traceback.format_exc()}"))


_pool = _Pool()
atexit.register(_pool.close, patience=5.0)
