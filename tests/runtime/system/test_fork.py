"""A forked child has no copy thread and perhaps locks that nobody will open; it runs exactly all the same."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
from backend_helper import Stack, tokens
from forked import in_child

import moepass
from moepass.runtime.transfer.copying import CopyThread, PendingCopy
from moepass.runtime.transfer.link import Link

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs a fork that is safe"),
    pytest.mark.usefixtures("no_grad"),
]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_a_forked_child_runs_exactly(runs: int) -> None:
    """After one run nothing is copied ahead; after more, copies are under way or done while the child is made."""
    model = Stack("dense_bmm", depth=3)
    expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Host(link="emulate:5e6"))
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    for _ in range(runs):
        compiled(tokens())

    def check() -> bool:
        return all(torch.equal(compiled(tokens()), expected) for _ in range(3))

    in_child(check)
    assert check()


def test_a_child_that_is_forked_while_another_thread_runs_the_model() -> None:
    model = Stack("dense_bmm", depth=3)
    expected = model(tokens())
    moepass.offload_experts(model, home=moepass.Host(link="emulate:1e6"))
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    compiled(tokens())
    right: list[bool] = []

    def work() -> None:
        with torch.no_grad():
            right.append(torch.equal(compiled(tokens()), expected))

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.05)  # a run takes 0.3 s
    assert worker.is_alive()
    in_child(lambda: torch.equal(compiled(tokens()), expected))
    worker.join(timeout=20)
    assert right == [True]


def test_a_copy_that_the_parent_began_is_made_again_by_the_child_that_waits_for_it() -> None:
    thread = CopyThread(Link(1000.0))
    source = torch.arange(100, dtype=torch.uint8)
    slot = torch.zeros_like(source)
    copies = [thread.submit(PendingCopy(source, slot, "layer")) for _ in range(2)]

    def check() -> bool:
        copies[1].wait()
        copies[0].abandon()
        copies[0].end()
        slot_of_child = torch.zeros_like(source)
        thread.submit(PendingCopy(source, slot_of_child, "layer")).wait()
        return torch.equal(slot, source) and torch.equal(slot_of_child, source)

    in_child(check)
    for copy in copies:
        copy.wait()
    assert torch.equal(slot, source)
