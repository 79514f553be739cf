"""Ranks of adopted models are killed at any moment: every other rank raises one clear error and cleans up."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from moepass.runtime.homes.peer_home import PeerPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows
from tests.helpers.processes.workers import Worker, join_group, named_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

RANKS = 3
TIMEOUT_S = 5.0
ATTEMPTS = 6
# Survivors that are compiling notice when they are done with that.


def _run_until_an_error(connection: Connection, store: str, rank: int) -> None:
    join_group(store, rank, RANKS)
    hidden = hidden_rows(SMALL, 16, rank)
    expected = build_stack(SMALL)(hidden)
    compiled = compile_whole(build_stack(SMALL, "all_to_all"), timeout_s=TIMEOUT_S)
    connection.send("joined")
    try:
        while torch.equal(compiled(hidden), expected):
            pass
        connection.send("wrong")
    except PeerError as error:
        connection.send(str(error))
    connection.recv()  # so that no survivor sees another one end


def _stop_at(connection: Connection, store: str, rank: int, stage: str) -> None:
    """Run until an error. Rank 1 reports when it reaches `stage` of the meeting, and waits there to be killed."""
    if rank == 1:
        owner: Any = PeerPacker if stage in ("agree_on", "pack_part") else PeerGroup
        real: Callable[..., Any] = getattr(owner, stage)

        def stop(*args: Any) -> Any:
            connection.send(stage)
            time.sleep(60)
            return real(*args)

        setattr(owner, stage, stop)
    _run_until_an_error(connection, store, rank)


def _survivors_end(workers: list[Worker], killed: int) -> None:
    """The survivors name a missing rank once, within the timeout, and end by themselves."""
    survivors = [worker for rank, worker in enumerate(workers) if rank != killed]
    messages = [worker.hear() for worker in survivors]
    # A survivor that ends drops its shards. Another one that opens them then names this survivor.
    assert any(f"rank {killed}" in message for message in messages), messages
    assert all("rank " in message for message in messages), messages
    for worker in survivors:
        worker.tell("end")
        worker.process.join(20)
        assert worker.process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_a_rank_may_be_killed_at_any_moment(attempt: int, tmp_path: Path) -> None:
    named = named_memory()
    # One moment in each of equal parts of 4 s.
    killed, moment = attempt % RANKS, 4.0 * (attempt + random.Random(attempt).random()) / ATTEMPTS
    with ExitStack() as stack:
        store = str(tmp_path / "store")
        workers = [stack.enter_context(Worker(_run_until_an_error, store, rank)) for rank in range(RANKS)]
        for worker in workers:
            assert worker.hear() == "joined"
        time.sleep(moment)  # the test varies this moment, so there is nothing to wait for
        workers[killed].kill()
        _survivors_end(workers, killed)
    assert named_memory() <= named


STAGES = ("agree_on", "make_segment", "pack_part", "share", "settle")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_may_be_killed_in_the_meeting(stage: str, tmp_path: Path) -> None:
    named = named_memory()
    with ExitStack() as stack:
        store = str(tmp_path / "store")
        workers = [stack.enter_context(Worker(_stop_at, store, rank, stage)) for rank in range(RANKS)]
        for worker in workers:
            assert worker.hear() == "joined"
        assert workers[1].hear() == stage
        workers[1].kill()
        _survivors_end(workers, 1)
    assert named_memory() <= named
