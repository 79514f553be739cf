"""Rank processes: started, watched, and started again when they end.

A rank that ends before it was ever ready would end again, so the first start fails then. Later a rank is started again
at once, and with growing pauses where it ends before it was ready, or soon after. Ranks that hold parts of one model
end together, because none of them can go on without the others. Ranks of a launcher are not started again: their
launcher starts all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from moepass.models.errors import MoepassError

logger = logging.getLogger("moepass")

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 30.0
# A rank that was ready for so long is started again without a pause: what ends it is not its start. [Empirical]
STEADY_SECONDS = 10.0
# A rank that is started again hangs where it takes that many times as long as it ever took to be ready. [Empirical]
START_PATIENCE, LEAST_START_SECONDS = 3.0, 300.0


class RankStartError(MoepassError, RuntimeError):
    """A rank ended before it was ready; `rank` tells which, `value` its exit status. Its own message came before."""


class RankLostError(MoepassError, RuntimeError):
    """A rank ended, and nobody here starts it again; `rank` tells which."""


class RankProcess(Protocol):
    """What a supervisor needs of asyncio's processes."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


class RankStarter(Protocol):
    """How a rank comes to life."""

    async def start(self) -> RankProcess: ...


@dataclasses.dataclass(frozen=True)
class RankCommand:
    """How a rank is started: a program with its arguments, and what it reads from its standard input."""

    arguments: Sequence[str]
    options: bytes

    async def start(self) -> RankProcess:
        process = await asyncio.create_subprocess_exec(*self.arguments, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        try:
            with contextlib.suppress(ConnectionError):  # it has ended already, which its status tells
                process.stdin.write(self.options)
                await process.stdin.drain()
                process.stdin.close()
        except BaseException:
            await _end(process)
            raise
        return process


def next_pause(seconds: float) -> float:
    """Behind a rank that ended too soon, when the last pause was so long."""
    return min(max(FIRST_PAUSE_SECONDS, 2 * seconds), MOST_PAUSE_SECONDS)


class Supervisor:
    """Keeps the processes of `ranks` ranks running.

    Args:
        command: the command of a rank, and of which attempt to run it, from 0 on; messages carry both.
        on_lost: called with the ranks whose processes have ended, before they are started again.
        ends_together: a rank that ends takes all others with it; they are started again together, as one attempt.
        restarts: a rank that ends is started again. Otherwise `lost` tells of it.
    """

    def __init__(
        self,
        ranks: int,
        command: Callable[[int, int], RankStarter],
        on_lost: Callable[[Sequence[int]], None],
        *,
        ends_together: bool = False,
        restarts: bool = True,
    ) -> None:
        self._command, self._on_lost, self._ends_together = command, on_lost, ends_together
        self._restarts = restarts
        self._processes: dict[int, RankProcess] = {}
        self._ready_since: dict[int, float] = {}
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
        self._ready_since[rank] = time.monotonic()
        self._ready[rank].set()

    def kill(self, rank: int) -> None:
        """End a rank that will not end by itself; then it is lost as any other that ends."""
        process = self._processes.get(rank)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def start(self) -> None:
        """Start all ranks and wait until they are ready. Raises RankStartError."""
        self._failure = asyncio.get_running_loop().create_future()
        ranks = list(self._ready)
        groups = [ranks] if self._ends_together else [[rank] for rank in ranks]
        self._tasks = [asyncio.create_task(self._keep(group)) for group in groups]
        everyone = asyncio.create_task(self._everyone_ready())
        await asyncio.wait((everyone, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            everyone.cancel()
            self._failure.result()

    async def lost(self) -> None:
        """Waits for a rank that ends and is not started again, once `start` is over. Raises RankLostError."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

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
        # One that was ready may be lost while another one is waited for.
        while not all(event.is_set() for event in self._ready.values()):
            for event in self._ready.values():
                await event.wait()

    async def _keep(self, ranks: Sequence[int]) -> None:
        """Run these ranks again and again, until the supervisor closes. Where one ends, all of them do."""
        pause = longest_start = 0.0
        was_ready = False
        while True:
            began = time.monotonic()
            waits = {asyncio.ensure_future((await self._started(rank)).wait()): rank for rank in ranks}
            seconds = max(LEAST_START_SECONDS, START_PATIENCE * longest_start)
            # How long the first start takes nobody knows, and somebody waits for it.
            late = asyncio.get_running_loop().call_later(seconds, self._end_unready, ranks) if was_ready else None
            try:
                ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if late is not None:
                    late.cancel()
            if self._is_closing:
                return
            first = next(iter(ended))
            rank, status = waits[first], first.result()
            for process in (self._processes[rank] for rank in ranks):
                await _end(process)
            is_ready = all(self._ready[one].is_set() for one in ranks)
            is_steady = is_ready and time.monotonic() - max(map(self._ready_since.__getitem__, ranks)) > STEADY_SECONDS
            was_ready = was_ready or is_ready
            if is_ready:
                longest_start = max(longest_start, max(map(self._ready_since.__getitem__, ranks)) - began)
            if not was_ready:
                self._fail(rank, status)
                return
            if not self._restarts:
                logger.error("rank %d has ended", rank)
                self._on_lost(ranks)
                assert self._failure is not None
                if not self._failure.done():
                    text = f"rank {rank} has ended; who launched the ranks must start all of them again"
                    self._failure.set_exception(RankLostError(text, rank=rank))
                return
            logger.error("rank %d ended with status %d; it is started again", rank, status)
            for one in ranks:
                self._ready[one].clear()
                self._attempts[one] += 1
            self._on_lost(ranks)
            pause = 0.0 if is_steady else next_pause(pause)
            await asyncio.sleep(pause)

    def _end_unready(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if not self._ready[rank].is_set():
                logger.error("rank %d is not ready, long after it was started again; it is ended", rank)
                self.kill(rank)

    async def _started(self, rank: int) -> RankProcess:
        process = await self._command(rank, self._attempts[rank]).start()
        self._processes[rank] = process
        return process

    def _fail(self, rank: int, status: int) -> None:
        assert self._failure is not None
        if not self._failure.done():
            text = f"rank {rank} ended with status {status} before it was ready; its own message tells why"
            self._failure.set_exception(RankStartError(text, rank=rank, value=status))


async def _end(process: RankProcess) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
