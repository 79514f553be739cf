"""Shared segments: visible to other processes, checked when opened, and freed with the last process that maps them."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from moepass.runtime.system import shared_memory
from moepass.runtime.system.processes import ProcessWatch, this_process
from moepass.runtime.system.shared_memory import PAGE_BYTES, SharedMemoryError, create_segment, open_segment
from tests.helpers.processes.workers import Worker, named_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _mappings(label: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{label}")


def _owner(connection: Connection, label: str) -> None:
    segment = create_segment(2 * PAGE_BYTES, label)
    memory = segment.map(PAGE_BYTES, 1000)
    memory.fill_(3)
    connection.send(segment.address())
    connection.recv()
    memory.fill_(4)
    connection.send("written")
    connection.recv()


@pytest.fixture
def owner() -> Iterator[Worker]:
    with Worker(_owner, "moepass-test") as worker:
        yield worker


def test_another_process_sees_what_the_owner_writes(owner: Worker) -> None:
    memory = open_segment(owner.hear()).map(PAGE_BYTES, 1000)
    assert memory.tolist() == [3] * 1000
    owner.tell()
    owner.hear()
    assert memory.tolist() == [4] * 1000


def test_memory_outlives_a_killed_owner_and_is_freed_with_its_last_user(owner: Worker) -> None:
    named = named_memory()
    address = owner.hear()
    memory = open_segment(address).map(PAGE_BYTES, 1000)
    owner.kill()
    assert memory.tolist() == [3] * 1000
    with pytest.raises(SharedMemoryError, match=rf"process {address.process.pid} is gone, or has closed"):
        open_segment(address)
    assert _mappings("moepass-test") == 1
    view = memory[10:20]
    del memory
    gc.collect()
    assert view.tolist() == [3] * 10
    del view
    gc.collect()
    assert _mappings("moepass-test") == 0
    assert named_memory() <= named


def test_a_segment_closes_with_its_object() -> None:
    segment = create_segment(PAGE_BYTES, "moepass-closing")
    memory = segment.map(0, PAGE_BYTES)
    address = segment.address()
    del segment
    gc.collect()
    memory.fill_(1)
    with pytest.raises(SharedMemoryError, match=r"is gone, or has closed|another file now"):
        open_segment(address)


def test_a_wrong_descriptor_or_size_is_refused() -> None:
    segment = create_segment(PAGE_BYTES, "moepass-test")
    address = segment.address()
    second = create_segment(PAGE_BYTES, "moepass-other").address()
    with pytest.raises(SharedMemoryError, match=rf"descriptor {address.descriptor} is another file now"):
        open_segment(dataclasses.replace(address, inode=second.inode + 1))
    with pytest.raises(SharedMemoryError, match=rf"has {PAGE_BYTES} bytes, not {PAGE_BYTES + 1}"):
        open_segment(dataclasses.replace(address, nbytes=PAGE_BYTES + 1))
    before = len(os.listdir("/proc/self/fd"))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_segment_cannot_shrink() -> None:
    segment = create_segment(PAGE_BYTES, "moepass-test")
    with pytest.raises(PermissionError):
        os.ftruncate(segment.address().descriptor, 0)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, 10), (-PAGE_BYTES, 10), (0, PAGE_BYTES + 1), (PAGE_BYTES, 1), (0, -1)]
)
def test_ranges_outside_a_segment_are_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(SharedMemoryError, match=rf"bytes {offset} to {offset + nbytes} of a segment of {PAGE_BYTES}"):
        create_segment(PAGE_BYTES, "moepass-test").map(offset, nbytes)


def test_zero_bytes_give_an_empty_tensor() -> None:
    memory = create_segment(PAGE_BYTES, "moepass-test").map(PAGE_BYTES, 0)
    assert (memory.numel(), memory.dtype) == (0, torch.uint8)


def test_memory_mapped_in_inference_mode_is_usable_outside_it() -> None:
    with torch.inference_mode():
        segment = create_segment(PAGE_BYTES, "moepass-test")
        memory, opened = segment.map(0, 10), open_segment(segment.address()).map(0, 10)
    assert not memory.is_inference()
    assert not opened.is_inference()


def test_a_platform_without_anonymous_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shared_memory.os, "memfd_create")
    with pytest.raises(SharedMemoryError, match="this platform has no memfd_create"):
        create_segment(10, "moepass-test")


def _wait_to_be_killed(connection: Connection) -> None:
    connection.send(this_process())
    connection.recv()


@pytest.mark.parametrize("with_handles", [True, False])
def test_a_watch_sees_processes_end(with_handles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_handles:
        monkeypatch.delattr(os, "pidfd_open")
    watch = ProcessWatch()
    with Worker(_wait_to_be_killed) as first, Worker(_wait_to_be_killed) as second:
        identities = [first.hear(), second.hear()]
        for key, identity in enumerate(identities):
            watch.add(key, identity)
        assert watch.gone() == set()
        second.kill()
        assert watch.gone() == {1}
        watch.add(7, identities[1])
        assert watch.gone() == {1, 7}
