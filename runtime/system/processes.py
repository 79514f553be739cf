"""Other processes of this machine, and whether they are still there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import weakref
from pathlib import Path

import psutil

from moepass.models.errors import MoepassError


class ProcessError(MoepassError, RuntimeError):
    """A process cannot be told or watched."""


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process that is there now. `machine` is equal for processes that see each other's numbers: one boot of one
    kernel, one namespace of processes.
    """

    machine: str
    pid: int


def this_process() -> ProcessIdentity:
    """Raises ProcessError where there is no /proc, which is everywhere but on Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise ProcessError(
            "machines are told apart by /proc, which this system does not have; it needs Linux"
        ) from error
    return ProcessIdentity(f"{socket.gethostname()} (boot {boot}, process namespace {namespace})", os.getpid())


class ProcessWatch:
    """Tells which of some processes are gone, in one system call where the kernel has handles of processes.

    psutil alone would take 30 to 70 microseconds for each process in every run.
    """

    def __init__(self) -> None:
        self._watched: dict[int, psutil.Process] = {}
        # By descriptor, which becomes readable as its process ends: the keys of processes that have one.
        self._handles: dict[int, int] = {}
        self._gone: set[int] = set()

    def add(self, key: int, process: ProcessIdentity) -> None:
        """Watch `process` of this machine as number `key`; again does no harm."""
        if key in self._watched and self._watched[key].pid == process.pid:
            return
        try:
            self._watched[key] = psutil.Process(process.pid)
        except psutil.NoSuchProcess:
            self._gone.add(key)
            return
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # older kernels, and processes that ended just now
                handle = os.pidfd_open(process.pid)
                self._handles[handle] = key
                weakref.finalize(self, os.close, handle)

    def gone(self) -> set[int]:
        """The numbers, as given to `add`, of processes that have ended, in whatever way."""
        # An object of its own for each call: threads may ask at once.
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        self._gone.update(self._handles[handle] for handle, _ in poll.poll(0))
        others = self._watched.keys() - self._handles.values()
        self._gone.update(key for key in others if _has_ended(self._watched[key]))
        return set(self._gone)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
