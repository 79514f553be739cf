"""This process and others of this machine: identity, whether they still run, open files, the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import select
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil

from moepass.models.errors import MoepassError


class ProcessError(MoepassError, RuntimeError):
    """A process cannot be identified or watched."""


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process that runs now; `machine` names one boot of one kernel and one namespace of process ids."""

    machine: str
    pid: int


def this_process() -> ProcessIdentity:
    """Return the identity of this process. Raises ProcessError on systems without /proc, that is, outside Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise ProcessError(
            "this system has no /proc, which is needed to distinguish processes of several machines; run on Linux"
        ) from error
    return ProcessIdentity(f"{socket.gethostname()} (boot {boot}, process namespace {namespace})", os.getpid())


class ProcessWatch:
    """Reports which of some processes have ended, in one system call if the kernel has process descriptors.

    psutil alone would take 30 to 70 microseconds per process in every run.
    """

    def __init__(self) -> None:
        self._watched: dict[int, psutil.Process] = {}
        # Keys of processes by process descriptor, which becomes readable when the process ends.
        self._handles: dict[int, int] = {}
        self._gone: set[int] = set()

    def add(self, key: int, process: ProcessIdentity) -> None:
        """Watch `process` of this machine as number `key`. Adding it again does nothing."""
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
        """Return the keys of processes that have ended, normally or not."""
        # Threads may call this at the same time, so each call has its own object.
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        self._gone.update(self._handles[handle] for handle, _ in poll.poll(0))
        without_handle = self._watched.keys() - self._handles.values()
        self._gone.update(key for key in without_handle if _has_ended(self._watched[key]))
        return set(self._gone)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def allow_many_files() -> int:
    """Raise the limit of open files, such as connections, as far as the system allows, and return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1 << 30 if most == resource.RLIM_INFINITY else most


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set the variable in a block, for all threads: libraries read it at each call."""
    old_value = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if old_value is not None:
            os.environ[name] = old_value
