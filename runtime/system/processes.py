"""Other processes of this machine: told apart although process numbers are used again, and watched without waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import weakref
from pathlib import Path

from moepass.models.errors import MoepassError


class ProcessError(MoepassError, RuntimeError):
    """A process cannot be told or watched."""


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process, for ever: `start_ticks` (clock ticks since boot) tells it from later ones with its number.

    `machine` is equal for processes that see each other's numbers: one boot of one kernel, one namespace of processes.
    """

    machine: str
    pid: int
    start_ticks: int


def this_process() -> ProcessIdentity:
    """Raises ProcessError where there is no /proc, which is everywhere but on Linux."""
    started = start_ticks(os.getpid())
    if started is None:
        raise ProcessError(
            "processes are told apart by /proc/PID/stat, which this system does not have; it needs Linux"
        )
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return ProcessIdentity(f"{socket.gethostname()} (boot {boot}, process namespace {namespace})", os.getpid(), started)


def start_ticks(pid: int) -> int | None:
    """When the process started; None where there is none with that number, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, and may contain anything.
    state, *rest = stat[stat.rindex(")") + 1 :].split()
    return None if state in "ZX" else int(rest[18])


class ProcessWatch:
    """Tells which of some processes are gone, in one system call."""

    def __init__(self) -> None:
        # A process as the kernel's handle for it, where the kernel has such, else by its number and start.
        self._handles: dict[int, int] = {}
        self._numbers: dict[int, ProcessIdentity] = {}
        self._gone: set[int] = set()
        self._added: dict[int, ProcessIdentity] = {}

    def add(self, key: int, process: ProcessIdentity) -> None:
        """Watch `process` of this machine as number `key`; again does no harm."""
        if self._added.get(key) == process:
            return
        self._added[key] = process
        handle = _open_handle(process.pid)
        if start_ticks(process.pid) != process.start_ticks:
            # Not by the handle: it may be that of a later process with the same number.
            self._gone.add(key)
            if handle is not None:
                os.close(handle)
        elif handle is None:
            self._numbers[key] = process
        else:
            self._handles[handle] = key
            weakref.finalize(self, os.close, handle)

    def gone(self) -> set[int]:
        """The numbers, as given to `add`, of processes that have ended, in whatever way."""
        if self._handles:
            # An object of its own for each call: threads may ask at once.
            poll = select.poll()
            for handle in self._handles:
                poll.register(handle, select.POLLIN)
            self._gone.update(self._handles[handle] for handle, _ in poll.poll(0))
        self._gone.update(key for key, process in self._numbers.items() if _has_ended(process))
        return set(self._gone)


def _has_ended(process: ProcessIdentity) -> bool:
    return start_ticks(process.pid) != process.start_ticks


def _open_handle(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system gives none."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
