"""Ranks that a launcher such as torchrun has started: they are watched and can be killed, but are not restarted.

Each rank writes its process id into a folder of the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

from moepass.models.errors import InputError
from moepass.runtime.system.processes import ProcessWatch, this_process

_POLL_SECONDS = 0.1


def announce(folder: Path, rank: int) -> None:
    """Write the id of this process into `folder`, for `rank`."""
    written = folder / f"rank-{rank}.new"
    written.write_text(str(os.getpid()), encoding="ascii")
    written.rename(_rank_file(folder, rank))  # a reader never sees a partly written file


async def launched_rank(folder: Path, rank: int) -> WatchedProcess:
    """Wait for the process number of `rank` in `folder`, and return its process. Raise InputError for other text."""
    file = _rank_file(folder, rank)
    while not file.exists():
        await asyncio.sleep(_POLL_SECONDS)
    text = file.read_text(encoding="ascii")
    if not text.isdecimal():
        message = f"{file} must contain the process id of rank {rank}, but contains {text!r}"
        raise InputError(message, name="pid", value=text)
    return WatchedProcess(int(text))


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


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"
