"""`moepass serve` under torchrun: its processes on one node are the ranks of one server.

torchrun starts the same command N times and passes each process its rank in the environment. The first process becomes
the server; its rank is a child process, as without torchrun. The others become ranks. All rendezvous through a folder
that only this user can enter:

    server:   creates the folder, writes the setup of the ranks there, and publishes its name in torchrun's store
    ranks:    read the name from the store and the setup from the folder, and write a file that announces them
    server:   watches their processes

Every process that reaches the port of torchrun's store can read and write it. So the store holds only the folder's
name, and ranks refuse a folder that other users can enter.
"""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moepass.cli.serve_options import RankSetup
from moepass.models.errors import MoepassError, OptionError
from moepass.runtime.serving.workers.supervisor import WatchedProcess, announce

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KEY = "folder"
_START = "start.json"
# The server publishes the folder before it loads anything, so a longer wait means that it has failed.
_MEETING_SECONDS = 300


class MeetingFolderError(MoepassError):
    """The folder for the rendezvous of the ranks is missing, or other users can enter it."""


class LaunchedProcess(msgspec.Struct, frozen=True):
    """A process that torchrun started: its number, the number of processes, and how often they were restarted."""

    rank: int
    ranks: int
    restarts: int


class RankStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message by which the server lets the other processes become ranks, which connect to its ZeroMQ endpoint."""

    endpoint: str
    server: int
    setup: RankSetup


def launched_process(environment: Mapping[str, str] = os.environ) -> LaunchedProcess | None:
    """Return this process among those that torchrun started, or None without torchrun.

    Raises OptionError if the processes are on several nodes, or torchrun keeps no store for them.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, ranks, on_node = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != on_node:
        text = (
            f"torchrun has started {ranks} processes, {on_node} of them on this node, but the ranks of a server must "
            "be on one node: start a server with --nnodes 1 on each node, behind a load balancer or Ray Serve"
        )
        raise OptionError(text, name="nnodes", value=ranks, expected=on_node)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        text = "torchrun has no store through which its processes could rendezvous; omit --rdzv-backend"
        raise OptionError(text, name="rdzv_backend", expected="static or c10d")
    return LaunchedProcess(rank, ranks, int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")))


def checked_ranks(launched: LaunchedProcess, ranks: int) -> int:
    """Return the number of ranks, one for each process. Raise OptionError if `--ranks` has another value."""
    if ranks not in (1, launched.ranks):
        text = (
            f"--ranks is {ranks}, but torchrun has started {launched.ranks} processes, each of which is a rank; leave "
            "out --ranks"
        )
        raise OptionError(text, name="ranks", value=ranks, expected=launched.ranks)
    return launched.ranks


def publish_setup(launched: LaunchedProcess, folder: Path, start: RankStart) -> None:
    """Write `start` to the server's own folder, from which the other processes read it."""
    with open(os.open(folder / _START, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(start))
    _store(launched).set(_KEY, str(folder))


def run_launched_rank(launched: LaunchedProcess) -> int:
    """Run this process as a rank until the server ends, and return the exit status."""
    from moepass.cli.serve_rank import serve_as_rank

    # torchrun ends all its processes at once, but ranks must stay until the server has answered all open requests.
    folder = Path(_store(launched).get(_KEY).decode())
    check_own_folder(folder)
    start = msgspec.json.decode((folder / _START).read_bytes(), type=RankStart)
    server = WatchedProcess(start.server)
    announce(folder, launched.rank)
    return serve_as_rank(start.setup, start.endpoint, launched.rank, 0, lambda: server.returncode is not None)


def check_own_folder(folder: Path) -> None:
    """Raise MeetingFolderError if other users can enter `folder`, since one of them may have made it."""
    try:
        status = folder.lstat()
    except OSError as error:
        text = f"the server's folder {folder} cannot be read: {error.strerror}"
        raise MeetingFolderError(text, path=folder) from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        message = (
            f"the server's folder {folder} belongs to user {status.st_uid} and has the mode {mode:o}; it must belong "
            f"to user {os.getuid()} and have the mode 700"
        )
        raise MeetingFolderError(message, path=folder, value=mode, expected=0o700)


def _store(launched: LaunchedProcess) -> Store:
    """Return the store that torchrun's processes share, with a prefix for this start."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=_MEETING_SECONDS)))
    return PrefixStore(f"moepass/{launched.restarts}", store)
