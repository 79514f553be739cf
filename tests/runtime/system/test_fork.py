"""All calls in a forked child raise one error, and the memory that its parent shares with other ranks is unchanged."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moepass
from moepass.runtime.ranks.eager_watch import FailureCheck
from moepass.runtime.system.forking import ForkedProcessError
from moepass.runtime.transfer.copying import CopyThread, SlotCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import whole
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes.collective_helper import (
    SMALL,
    adopted_model,
    bias_stack,
    compiled_model,
    hidden_states,
    offload_collective,
)
from tests.helpers.processes.forked import in_child
from tests.helpers.processes.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs a fork that is safe"),
    pytest.mark.usefixtures("no_grad"),
]


def _check_refused(*calls: Callable[[], object]) -> None:
    """Check that each of `calls` raises ForkedProcessError in a forked child."""
    parent = os.getpid()

    def check() -> bool:
        for call in calls:
            with pytest.raises(ForkedProcessError, match="start processes with multiprocessing's 'spawn'") as caught:
                call()
            assert (caught.value.owner, caught.value.child) == (parent, os.getpid())
        return True

    in_child(check)


def _host(model: torch.nn.Module, folder: Path) -> None:
    moepass.offload_experts(model, home=moepass.Host(link="emulate:5e6"))


def _disk(model: torch.nn.Module, folder: Path) -> None:
    moepass.offload_experts(model, home=moepass.Disk(folder=folder))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("offload", [_host, _disk])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_forked_child_is_refused_during_and_between_runs(
    offload: Callable[[torch.nn.Module, Path], None], is_running: bool, tmp_path: Path
) -> None:
    model = Stack("dense_bmm", depth=3)
    expected = model(tokens())
    offload(model, tmp_path)
    compiled = compiled_model(model)
    compiled(tokens())
    held, ended = threading.Event(), threading.Event()
    store = moepass.offload_report(model).store

    def hold_locks() -> None:
        with store._ring_lock, store.ring()._lock.take():
            held.set()
            assert ended.wait(60)

    holder = threading.Thread(target=hold_locks)
    if is_running:
        holder.start()
        assert held.wait(20)
    bank = store.banks[0].spec
    _check_refused(
        lambda: compiled(tokens()), lambda: model(tokens()), lambda: store.read_tensor(bank, (), 0), store.ring
    )
    ended.set()
    if is_running:
        holder.join()
    assert torch.equal(compiled(tokens()), expected)


def test_a_copy_thread_accepts_no_copies_from_a_child() -> None:
    thread, slot = CopyThread(Link()), torch.zeros(4, dtype=torch.uint8)
    _check_refused(lambda: thread.submit(SlotCopy([whole(slot)], slot, "layer")))


def test_a_child_can_use_objects_that_it_made() -> None:
    def check() -> bool:
        model = Stack("dense_bmm", depth=2)
        expected = model(tokens())
        moepass.offload_experts(model)
        return torch.equal(compiled_model(model)(tokens()), expected)

    in_child(check)


def _homes_of_ranks(home: str) -> None:
    gc.collect()  # the groups of earlier tests: a child that dropped them would wait for their threads
    with torch.no_grad():
        model: Any
        if home == "adopted":
            compiled = adopted_model(SMALL, transport="pull")
            model, inputs = compiled, hidden_states(SMALL, 8, seed=dist.get_rank())
        else:
            model, inputs = bias_stack(), tokens()
            if home == "collective":
                offload_collective(model)
            else:
                moepass.offload_experts(model, {"peer": moepass.Peer, "hybrid": moepass.Hybrid}[home](timeout_s=50))
            compiled = compiled_model(model)
        expected = compiled(inputs)
        fresh = bias_stack()
        calls: list[Callable[[], object]] = [
            lambda: compiled(inputs),
            # The connection to the store is the parent's.
            lambda: moepass.offload_experts(fresh, home=moepass.Peer(timeout_s=5)),
        ]
        if home == "collective":
            calls += [lambda: model(inputs), lambda: moepass.gather_only_step(model)]
        _check_refused(*calls)

        def drop_all() -> bool:
            nonlocal model, compiled
            del model, compiled, calls[:]
            torch._dynamo.reset()
            return gc.collect() >= 0

        if home != "collective":  # gloo's own connections cannot be dropped in a child: torch waits for their threads
            in_child(drop_all)
        dist.barrier()
        assert torch.equal(compiled(inputs), expected)
        FailureCheck(dist.group.WORLD).check()  # type: ignore[arg-type]  # it is initialised


@pytest.mark.slow
@pytest.mark.parametrize("home", ["peer", "hybrid", "collective", "adopted"])
def test_the_child_of_a_rank_is_refused_and_its_parent_continues(home: str) -> None:
    run_ranks(2, _homes_of_ranks, home)
