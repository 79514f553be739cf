"""Single processes that a test communicates with and may kill, to test what happens when a rank ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes.ranks import _PRELOADED

_ANSWER_SECONDS = 60.0


class Worker:
    """A process that runs `function(connection, *args)`, connected to this object and killed after `with`."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tell(self, message: Any = None) -> None:
        self.connection.send(message)

    def hear(self) -> Any:
        """Return the next message of the process. Raises the exception that the process raised."""
        assert self.connection.poll(_ANSWER_SECONDS), "the process says nothing"
        answer = self.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def _run(connection: Connection, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        function(connection, *args)
    except BaseException:
        connection.send(AssertionError(traceback.format_exc()))


def join_group(store: str, rank: int, size: int) -> None:
    """Form a gloo group through the file `store`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def named_memory() -> set[str]:
    """Return the names of shared memory of all processes, without the semaphores of multiprocessing and tqdm."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
