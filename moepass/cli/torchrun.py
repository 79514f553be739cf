"""`moepass serve` under torchrun: its processes on one node are the ranks of one server.

torchrun starts the same command N times and says in the environment which one each is. The first becomes the server;
its rank is a child, as without torchrun. The others become ranks. They meet in a folder of this user alone:

    server:   makes the folder, writes there what ranks are told, and names the folder in torchrun's store
    ranks:    read the name from the store and what they are told from the folder; write down that they are there
    server:   watches their processes

Whoever reaches the port of torchrun's store can read and write it, so it holds no more than the folder's name, and a
folder that others may enter is refused.
"""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moepass.cli.rank_options import RankSetup
from moepass.models.errors import MoepassError, OptionError
from moepass.runtime.serving.workers.launched_ranks import announce

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_KEY = "folder"
_START = "start.json"
# The server writes the folder's name before it loads anything; whoever waits longer waits in vain.
_MEETING_SECONDS = 300


class MeetingFolderError(MoepassError):
    """The folder in which the ranks should meet is not one that this user alone can enter."""


class LaunchedProcess(msgspec.Struct, frozen=True):
    """What torchrun says of this process: its `rank`, of `ranks`, and how often they were restarted."""

    rank: int
    ranks: int
    restarts: int


class RankStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The message by which the server lets the other processes become ranks.

    Attributes:
        endpoint: the ZeroMQ endpoint at which the server listens for ranks.
        server: the process number of the server.
        setup: the model and the options of every rank.
    """

    endpoint: str
    server: int
    setup: RankSetup


def launched_process(environment: Mapping[str, str] = os.environ) -> LaunchedProcess | None:
    """Which of torchrun's processes this is; None where torchrun has not started it.

    Raises OptionError for processes on several nodes, and where torchrun keeps no store for them.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, ranks, on_node = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != on_node:
        raise OptionError(
            f"torchrun has started {ranks} processes, {on_node} of them on this node; the ranks of a server are on one "
            "node: start a server with --nnodes 1 on each node, and a load balancer or Ray Serve before them",
            name="nnodes",
            value=ranks,
            expected=on_node,
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise OptionError(
            "torchrun keeps no store for its processes, in which they could meet; leave --rdzv-backend away",
            name="rdzv_backend",
            expected="static or c10d",
        )
    return LaunchedProcess(rank, ranks, int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")))


def checked_ranks(launched: LaunchedProcess, ranks: int) -> int:
    """How many ranks there are: as many as processes. Raises OptionError where `--ranks` says something else."""
    if ranks not in (1, launched.ranks):
        raise OptionError(
            f"--ranks is {ranks}, and torchrun has started {launched.ranks} processes, each of which is a rank; leave "
            "--ranks away",
            name="ranks",
            value=ranks,
            expected=launched.ranks,
        )
    return launched.ranks


def tell_ranks(launched: LaunchedProcess, folder: Path, start: RankStart) -> None:
    """Tell the other processes how to become ranks; `folder` is this server's own."""
    with open(os.open(folder / _START, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(start))
    _store(launched).set(_KEY, str(folder))


def run_launched_rank(launched: LaunchedProcess) -> int:
    """Be the rank that this process is to be, until the server ends. Returns the exit status."""
    from moepass.cli.serve_rank import serve_as_rank
    from moepass.runtime.serving.workers.launched_ranks import ServerWatch

    # torchrun ends all its processes at once; the ranks end when the server has answered what is open.
    folder = Path(_store(launched).get(_KEY).decode())
    check_own_folder(folder)
    start = msgspec.json.decode((folder / _START).read_bytes(), type=RankStart)
    watch = ServerWatch(start.server)
    announce(folder, launched.rank)
    return serve_as_rank(start.setup, start.endpoint, launched.rank, 0, watch)


def check_own_folder(folder: Path) -> None:
    """Raises MeetingFolderError where others may enter `folder`, which then may be theirs."""
    try:
        found = folder.lstat()
    except OSError as error:
        text = f"the server's folder {folder} cannot be read: {error.strerror}"
        raise MeetingFolderError(text, path=folder) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise MeetingFolderError(
            f"the server's folder {folder} belongs to user {found.st_uid} with the mode "
            f"{stat.S_IMODE(found.st_mode):o}; ranks of user {os.getuid()} meet in a folder of that user with the mode "
            "700 alone",
            path=folder,
            value=stat.S_IMODE(found.st_mode),
            expected=0o700,
        )


def _store(launched: LaunchedProcess) -> Store:
    """What torchrun's processes share, as far as it is about this start of them."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=_MEETING_SECONDS)))
    return PrefixStore(f"moepass/{launched.restarts}", store)
