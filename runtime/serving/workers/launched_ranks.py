"""Ranks whose processes a launcher has started, such as torchrun: watched, and ended, but not started again.

They and the server meet in a folder of the server, into which each rank writes its process number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import psutil

from moepass.models.errors import InputError
from moepass.runtime.system.processes import ProcessWatch, this_process

_LOOK_SECONDS = 0.1


def announce(folder: Path, rank: int) -> None:
    """Say that this process is `rank`."""
    written = folder / f"rank-{rank}.new"
    written.write_text(str(os.getpid()), encoding="ascii")
    written.rename(_place(folder, rank))  # so that nobody reads a half of it


class ServerWatch:
    """Whether the server still runs, for ranks that it has not started."""

    def __init__(self, server: int) -> None:
        self._watch = _watch_of(server)

    def is_gone(self) -> bool:
        return bool(self._watch.gone())


@dataclasses.dataclass(frozen=True)
class LaunchedRank:
    """A rank that announces itself in `folder`, sooner or later."""

    folder: Path
    rank: int

    async def start(self) -> WatchedProcess:
        """Its process, once it is there."""
        place = _place(self.folder, self.rank)
        while not place.exists():
            await asyncio.sleep(_LOOK_SECONDS)
        text = place.read_text(encoding="ascii")
        if not text.isdecimal():
            raise InputError(f"rank {self.rank} is said to be process {text!r}", name="pid", value=text)
        return WatchedProcess(int(text))


class WatchedProcess:
    """A process that is no child of this one, as far as it can be handled like one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._watch = _watch_of(pid)
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        """None while it runs. Its real status is told to its launcher alone; here it is 1."""
        return 1 if self._watch.gone() else None

    def kill(self) -> None:
        """Raises ProcessLookupError where it has ended."""
        try:
            if self._process is None:
                raise psutil.NoSuchProcess(self._pid)
            self._process.kill()  # which knows whether another process has the number now
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(self._pid) from error

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await asyncio.sleep(_LOOK_SECONDS)
        return status


def _place(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _watch_of(pid: int) -> ProcessWatch:
    watch = ProcessWatch()
    watch.add(0, dataclasses.replace(this_process(), pid=pid))
    return watch
