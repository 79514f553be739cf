"""Rank processes: started, watched, and started again when they end.

A rank that ends before it was ever ready would end again, so the first start fails then. Later a rank is started again
at once, and with growing pauses where it keeps ending. Ranks that hold parts of one model end together, because none of
them can go on without the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

from moepass.models.errors import MoepassError

logger = logging.getLogger("moepass")

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 30.0
# A rank that was ready for so long may end without a pause.
_STEADY_SECONDS = 60.0


class RankStartError(MoepassError, RuntimeError):
    """A rank ended before it was ready; `rank` tells which, `value` its exit status. Its own message came before."""


@dataclasses.dataclass(frozen=True)
class RankCommand:
    """How a rank is started: a program with its arguments, and what it reads from its standard input."""

    arguments: Sequence[str]
    options: bytes


class Supervisor:
    """Keeps the processes of `ranks` ranks running.

    Args:
        command: the command of a rank, and of which attempt to run it, from 0 on; messages carry both.
        on_lost: called with a rank whose process has ended, before it is started again.
        ends_together: a rank that ends takes all others with it.
    """

    def __init__(
        self,
        ranks: int,
        command: Callable[[int, int], RankCommand],
        on_lost: Callable[[int], None],
        *,
        ends_together: bool = False,
    ) -> None:
        self._command, self._on_lost, self._ends_together = command, on_lost, ends_together
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in range(ranks)}
        self._attempts = dict.fromkeys(range(ranks), 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._failure: asyncio.Future[None] | None = None

    @property
    def attempts(self) -> dict[int, int]:
        """Of each rank, how often it was started again."""
        return dict(self._attempts)

    @property
    def processes(self) -> dict[int, int]:
        """The process numbers of the ranks that run."""
        return {rank: process.pid for rank, process in self._processes.items() if process.returncode is None}

    def is_current(self, rank: int, attempt: int) -> bool:
        """Whether a message of that attempt is still of interest."""
        return self._attempts.get(rank) == attempt

    def ready(self, rank: int) -> None:
        self._ready[rank].set()

    async def start(self) -> None:
        """Start all ranks and wait until they are ready. Raises RankStartError."""
        self._failure = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep(rank)) for rank in self._ready]
        everyone = asyncio.create_task(self._everyone_ready())
        await asyncio.wait((everyone, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            everyone.cancel()
            self._failure.result()

    async def close(self, seconds: float) -> None:
        """Wait for the ranks to end by themselves, which they have been told to, and after `seconds` end them."""
        self._is_closing = True
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            await _end(process)

    async def _everyone_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def _keep(self, rank: int) -> None:
        """Run the rank again and again, until the supervisor closes."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        was_ready = False
        while True:
            command = self._command(rank, self._attempts[rank])
            process = await asyncio.create_subprocess_exec(*command.arguments, stdin=asyncio.subprocess.PIPE)
            self._processes[rank] = process
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):  # it has ended already, which the next line sees
                process.stdin.write(command.options)
                await process.stdin.drain()
                process.stdin.close()
            begun = loop.time()
            status = await process.wait()
            if self._is_closing:
                return
            was_ready = was_ready or self._ready[rank].is_set()
            if not was_ready:
                self._fail(rank, status)
                return
            logger.error("rank %d ended with status %d; it is started again", rank, status)
            self._ready[rank].clear()
            self._attempts[rank] += 1
            self._on_lost(rank)
            if self._ends_together:
                for other, running in self._processes.items():
                    if other != rank and running.returncode is None:
                        running.kill()
            if loop.time() - begun > _STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)

    def _fail(self, rank: int, status: int) -> None:
        assert self._failure is not None
        if not self._failure.done():
            text = f"rank {rank} ended with status {status} before it was ready; its own message tells why"
            self._failure.set_exception(RankStartError(text, rank=rank, value=status))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
