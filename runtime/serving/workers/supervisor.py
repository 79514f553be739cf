"""The rank processes: started, watched, and restarted when they end.

A rank that ends before it was ever ready would end again, so the start fails. A rank that has been ready once is
restarted whenever it ends: at once if it was ready for more than STEADY_SECONDS, otherwise after a pause, which doubles
each time up to MOST_PAUSE_SECONDS. Ranks that hold parts of one model end together, because none of them can continue
without the others. Ranks that a launcher such as torchrun has started write their process ids into a folder of the
server. They are not restarted: their launcher must start all of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from moepass.models.errors import InputError, MoepassError
from moepass.runtime.system.processes import ProcessWatch, this_process

logger = logging.getLogger("moepass")

# How often a thread of a rank looks for the end of the others' work before it sleeps. Threads that wait longer take the
# core that the last of them needs, if other programs use the machine. [Empirical] 2 cores, 8 layers in fp32, requests/s
# alone and with one core busy: 10,000 spins 1.29 and 0.43, 1,000 spins 1.29 and 0.64, no spins 1.0 and 0.71. libgomp's
# default is 300,000: alone 1.29, and with one core busy (and niceness 5) no answer within 12 s.
WAIT_SPINS = "1000"
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 30.0
# A rank that was ready for at least this long is restarted without a pause: its start is not the problem. [Empirical]
STEADY_SECONDS = 10.0
# A restarted rank is killed if it is not ready after this multiple of its longest start, but not before
# LEAST_START_SECONDS. [Empirical]
START_PATIENCE, LEAST_START_SECONDS = 3.0, 300.0
_POLL_SECONDS = 0.1


class RankStartError(MoepassError, RuntimeError):
    """A rank ended before it was ready. `rank` is its number and `value` its exit status."""


class RankLostError(MoepassError, RuntimeError):
    """A rank ended that this process does not restart. `rank` is its number."""


class WatchedProcess:
    """A process that is not a child of this one, with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._watch = ProcessWatch()
        self._watch.add(0, dataclasses.replace(this_process(), pid=pid))

    @property
    def returncode(self) -> int | None:
        """The exit status: None while the process runs, then 1, because only the launcher knows the real one."""
        return 1 if self._watch.gone() else None

    def kill(self) -> None:
        """Kill the process. Raise ProcessLookupError if it has ended."""
        if self.returncode is not None:  # the number may belong to another process now
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process ends, and return 1."""
        while (status := self.returncode) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return status


RankProcess = asyncio.subprocess.Process | WatchedProcess


async def start_process(arguments: Sequence[str], options: bytes) -> RankProcess:
    """Start a rank: a program with its arguments. Write `options` to its standard input."""
    environment = dict(os.environ)
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", WAIT_SPINS)
    process = await asyncio.create_subprocess_exec(*arguments, stdin=asyncio.subprocess.PIPE, env=environment)
    assert process.stdin is not None
    try:
        with contextlib.suppress(ConnectionError):  # the process has ended; its status reports that
            process.stdin.write(options)
            await process.stdin.drain()
            process.stdin.close()
    except BaseException:
        await _end(process)
        raise
    return process


def announce(folder: Path, rank: int) -> None:
    """Write the id of this process into `folder`, for `rank`."""
    written = folder / f"rank-{rank}.new"
    written.write_text(str(os.getpid()), encoding="ascii")
    written.rename(_rank_file(folder, rank))  # a reader never sees a partly written file


async def launched_rank(folder: Path, rank: int) -> WatchedProcess:
    """Wait for the process id of `rank` in `folder`, and return its process. Raise InputError for other text."""
    file = _rank_file(folder, rank)
    while not file.exists():
        await asyncio.sleep(_POLL_SECONDS)
    text = file.read_text(encoding="ascii")
    if not text.isdecimal():
        message = f"{file} must contain the process id of rank {rank}, but contains {text!r}"
        raise InputError(message, name="pid", value=text)
    return WatchedProcess(int(text))


def next_pause(seconds: float) -> float:
    """Return the pause in seconds before a rank that ended too soon is restarted; `seconds` is the last pause."""
    return min(max(FIRST_PAUSE_SECONDS, 2 * seconds), MOST_PAUSE_SECONDS)


class Supervisor:
    """Keeps the processes of all ranks running.

    `start_process` is called with a rank and the number of its start, from 0 on, and `on_lost` with the ranks whose
    processes have ended, before they are restarted. With `ends_together`, the end of one rank ends all, and they are
    restarted together. Without `restarts`, `lost` raises instead.
    """

    def __init__(
        self,
        ranks: int,
        start_process: Callable[[int, int], Awaitable[RankProcess]],
        on_lost: Callable[[Sequence[int]], None],
        *,
        ends_together: bool = False,
        restarts: bool = True,
    ) -> None:
        self._start_process, self._on_lost = start_process, on_lost
        self._ends_together, self._restarts = ends_together, restarts
        self._processes: dict[int, RankProcess] = {}
        self._ready_since: dict[int, float] = {}
        self._ready: dict[int, asyncio.Event] = {rank: asyncio.Event() for rank in range(ranks)}
        self.attempts = dict.fromkeys(range(ranks), 0)  # the number of restarts of each rank
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._failure: asyncio.Future[None] | None = None

    @property
    def processes(self) -> dict[int, int]:
        """The process ids of the ranks that run."""
        return {rank: process.pid for rank, process in self._processes.items() if process.returncode is None}

    def is_current(self, rank: int, attempt: int) -> bool:
        """Return True if `attempt` is the last start of `rank`, so that its messages are valid."""
        return self.attempts.get(rank) == attempt

    def ready(self, rank: int) -> None:
        """Record that `rank` is ready."""
        self._ready_since[rank] = time.monotonic()
        self._ready[rank].set()

    def kill(self, rank: int) -> None:
        """Kill a rank that hangs; it is then handled as a lost rank."""
        process = self._processes.get(rank)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def start(self) -> None:
        """Start all ranks and wait until they are ready. Raise RankStartError if one ends first."""
        self._failure = asyncio.get_running_loop().create_future()
        ranks = list(self._ready)
        groups = [ranks] if self._ends_together else [[rank] for rank in ranks]
        self._tasks = [asyncio.create_task(self._keep_running(group)) for group in groups]
        all_ready = asyncio.create_task(self._wait_until_ready())
        await asyncio.wait((all_ready, self._failure), return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            all_ready.cancel()
            self._failure.result()

    async def lost(self) -> None:
        """Wait until a rank ends that is not restarted, and raise RankLostError. Call it after `start`."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the ranks to end, which the frontend has asked for, then kill the remaining ones."""
        self._is_closing = True
        waits = [asyncio.create_task(process.wait()) for process in self._processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            await _end(process)

    async def _wait_until_ready(self) -> None:
        # A rank that was ready may be lost while this waits for another rank.
        while not all(event.is_set() for event in self._ready.values()):
            for event in self._ready.values():
                await event.wait()

    async def _keep_running(self, ranks: Sequence[int]) -> None:
        """Run these ranks until the supervisor closes; if one ends, end and restart all of them."""
        pause = longest_start = 0.0
        was_ready = False
        while True:
            start_time = time.monotonic()
            for rank in ranks:
                self._processes[rank] = await self._start_process(rank, self.attempts[rank])
            waits = {asyncio.ensure_future(self._processes[rank].wait()): rank for rank in ranks}
            seconds = max(LEAST_START_SECONDS, START_PATIENCE * longest_start)
            # The first start has no limit: its duration is unknown, and `start` waits for it.
            late = asyncio.get_running_loop().call_later(seconds, self._kill_unready, ranks) if was_ready else None
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
            is_steady = False
            if all(self._ready[member].is_set() for member in ranks):
                was_ready, ready_since = True, max(self._ready_since[member] for member in ranks)
                is_steady = time.monotonic() - ready_since > STEADY_SECONDS
                longest_start = max(longest_start, ready_since - start_time)
            if not was_ready:
                text = (
                    f"rank {rank} ended with status {status} before it was ready; its own output above has the reason"
                )
                self._fail(RankStartError(text, rank=rank, value=status))
                return
            if not self._restarts:
                logger.error("rank %d has ended", rank)
                self._on_lost(ranks)
                text = f"rank {rank} has ended; start all ranks again with the launcher that started them"
                self._fail(RankLostError(text, rank=rank))
                return
            logger.error("rank %d ended with status %d and is restarted", rank, status)
            for member in ranks:
                self._ready[member].clear()
                self.attempts[member] += 1
            self._on_lost(ranks)
            pause = 0.0 if is_steady else next_pause(pause)
            await asyncio.sleep(pause)

    def _kill_unready(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if not self._ready[rank].is_set():
                logger.error("rank %d was restarted, is still not ready, and is killed", rank)
                self.kill(rank)

    def _fail(self, error: MoepassError) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(error)


async def _end(process: RankProcess) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
