"""Gathers in device memory, by threads as ranks, with links that move nothing: errors name the failed rank in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from moepass.models.errors import InputError
from moepass.runtime.ranks import device_gathers
from moepass.runtime.ranks.device_gathers import DeviceGatherGroup
from moepass.runtime.ranks.device_links import NcclLinks, TensorsByRank, check_nccl
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from tests.helpers.graphs.error_fields import refused

T = TypeVar("T")
CPU = torch.device("cpu")
PARTS = [torch.zeros(4, dtype=torch.uint8)]


class _Links(NcclLinks):
    """Links whose exchange ends when `has_ended` is set."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.is_aborted = threading.Event()

    def exchange(self, send: TensorsByRank, receive: TensorsByRank) -> None:
        _stream.links = self

    def abort(self) -> None:
        self.is_aborted.set()


# The last event on the stream of each thread.
_stream = threading.local()


class _Event:
    def record(self, links: _Links) -> None:
        self._links = links

    def query(self) -> bool:
        return self._links.has_ended.is_set()


@pytest.fixture(autouse=True)
def _streams_of_threads() -> Iterator[None]:
    def current_stream(device: torch.device) -> _Links:
        links: _Links = _stream.links
        return links

    with (
        mock.patch.multiple(torch.cuda, Event=_Event, current_stream=current_stream),
        mock.patch.object(device_gathers, "_GRACE_S", 0.5),
    ):
        yield


def _on_ranks(ranks: list[int], function: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


def _groups(ranks: int, timeout_s: float, store: HashStore | None = None) -> tuple[list[Any], list[_Links]]:
    store, links = store or HashStore(), [_Links() for _ in range(ranks)]

    def join(rank: int) -> DeviceGatherGroup:
        meeting = Rendezvous(store, rank, ranks, timeout_s, "come")
        return DeviceGatherGroup(meeting, lambda request: f"bank {request[0]}", CPU, lambda *_: links[rank])

    return _on_ranks(list(range(ranks)), join), links


def _gather_error(group: DeviceGatherGroup) -> str:
    tensors = dict.fromkeys(group.others, PARTS)
    with pytest.raises(PeerError) as caught:
        group.gather((5, 0, 8), tensors, tensors)
    return str(caught.value)


def test_a_gather_ends_when_the_parts_of_all_ranks_have() -> None:
    groups, links = _groups(3, 20.0)
    ended: list[int] = []

    def gather(rank: int) -> None:
        groups[rank].gather((5, 0, 8), {}, {}, overlapped=lambda: None)
        ended.append(rank)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(gather, rank) for rank in range(3)]
        for rank in (0, 2):
            links[rank].has_ended.set()
        time.sleep(0.05)  # the threads probably wait by then; the outcome is the same if not
        assert ended == []
        links[1].has_ended.set()
        for future in running:
            future.result()
    assert sorted(ended) == [0, 1, 2]


def test_a_part_that_does_not_end_names_its_rank_on_all() -> None:
    groups, links = _groups(3, 0.5)
    for rank in (0, 1):
        links[rank].has_ended.set()
    (text,) = set(_on_ranks([0, 1, 2], lambda rank: _gather_error(groups[rank])))
    assert text == (
        "rank 2 did not end the gather of bank 5 within 0.5 s (transport 'collective'), though all ranks are there"
    )
    assert all(link.is_aborted.is_set() for link in links)
    for group in groups:
        with refused(PeerError, rank=2):
            group.check()


def test_parts_that_no_rank_ends_name_all() -> None:
    groups, _ = _groups(2, 0.5)
    (text,) = set(_on_ranks([0, 1], lambda rank: _gather_error(groups[rank])))
    assert text.startswith("ranks 0, 1 did not end the gather of bank 5 within 0.5 s")


def test_a_rank_that_is_gone_is_named_when_the_timeout_is_over() -> None:
    groups, links = _groups(2, 0.5)
    groups[1] = None
    text = _gather_error(groups[0])
    assert text.startswith(
        "rank 1 has ended or dropped its model: the connection to it (transport 'collective') was lost"
    )
    assert links[0].is_aborted.is_set()


def test_a_rank_that_does_not_come_to_the_end_is_named() -> None:
    groups, links = _groups(2, 0.5)
    links[0].has_ended.set()
    assert _gather_error(groups[0]).startswith("rank 1 did not end the gather of bank 5 within 0.5 s")


def test_a_failure_on_one_rank_ends_the_gathers_of_the_others_long_before_the_timeout() -> None:
    groups, links = _groups(3, 60.0)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(_gather_error, groups[rank]) for rank in (0, 2)]
        groups[1].fail(PeerError("by hand", rank=1))
        assert [future.result() for future in waiting] == ["by hand", "by hand"]
    assert time.monotonic() - began < 20
    assert all(link.is_aborted.is_set() for link in links)


def _connect_errors(ranks: int, timeout_s: float, connect: Callable[[int], _Links]) -> list[str]:
    store = HashStore()

    def join(rank: int) -> str:
        meeting = Rendezvous(store, rank, ranks, timeout_s, "come")
        with pytest.raises(PeerError) as caught:
            DeviceGatherGroup(meeting, str, CPU, lambda *_: connect(rank))
        return str(caught.value)

    texts = _on_ranks(list(range(ranks)), join)
    with pytest.raises(PeerError, match="got out of step before"):
        Rendezvous(store, 0, ranks, timeout_s, "come")
    return texts


def test_devices_that_cannot_be_connected_are_one_error() -> None:
    def connect(rank: int) -> _Links:
        if rank == 1:
            raise RuntimeError("Duplicate GPU detected")
        time.sleep(0.2)  # a real stream would wait as well
        return _Links()

    (text,) = set(_connect_errors(3, 20.0, connect))
    assert text == "rank 1 could not connect its cpu to the other ranks: Duplicate GPU detected"


def test_devices_that_do_not_connect_are_one_error_within_the_timeout() -> None:
    end = threading.Event()

    def connect(rank: int) -> _Links:
        if rank == 0:
            end.wait(20)
        return _Links()

    try:
        (text,) = set(_connect_errors(2, 0.5, connect))
    finally:
        end.set()
    assert text.startswith("rank 0 did not connect to the devices of the others within 0.5 s (transport 'collective')")


class _Nccl:
    """A stand-in for torch's ProcessGroupNCCL that records its calls."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            assert is_high_priority_stream

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        assert options._timeout.total_seconds() == 7
        self.calls: list[Any] = [os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], (rank, size)]
        made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(device)

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> _Nccl:
        self.calls.append("end")
        return self

    def wait(self) -> None:
        self.calls.append("wait")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("send", rank, *(tensor.tolist() for tensor in tensors)))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("receive", rank, *(tensor.tolist() for tensor in tensors)))

    def abort(self) -> None:
        self.calls.append("abort")


made: list[_Nccl] = []


def test_nccl_is_asked_for_one_operation_with_all_parts() -> None:
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", _Nccl, create=True),
        mock.patch.multiple(torch.cuda, device=mock.MagicMock(), synchronize=mock.Mock()),
    ):
        links = NcclLinks(Rendezvous(HashStore(), 1, 3, 7.0, "come"), CPU)
        nccl = made.pop()
        first = ["start", ("receive", 0, [0]), ("receive", 2, [0]), ("send", 0, [0]), ("send", 2, [0]), "end", "wait"]
        assert nccl.calls == ["0", (1, 3), CPU, *first]
        nccl.calls.clear()
        numbers = torch.arange(9, dtype=torch.uint8)
        links.exchange({2: [numbers[:2], numbers[2:2]]}, {0: [numbers[3:4], numbers[4:6]], 2: [numbers[:0]]})
        parts = [("receive", 0, [3]), ("receive", 0, [4, 5]), ("send", 2, [0, 1])]
        assert nccl.calls == ["start", *parts, "end", "wait"]
        nccl.calls.clear()
        links.exchange({}, {0: [numbers[:0]]})
        assert nccl.calls == []
        links.abort()
        links.abort()
        assert nccl.calls == ["abort"]
        del links
        assert nccl.calls == ["abort"]


def test_nccl_ends_with_its_links() -> None:
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", _Nccl, create=True),
        mock.patch.multiple(torch.cuda, device=mock.MagicMock(), synchronize=mock.Mock()),
    ):
        links = NcclLinks(Rendezvous(HashStore(), 0, 1, 7.0, "come"), CPU)
        nccl = made.pop()
        del links
        assert nccl.calls[-1] == "abort"


def test_a_torch_without_nccl_is_an_error_that_says_what_to_use() -> None:
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=False),
        refused(InputError, name="transport", value="collective", expected="pull"),
    ):
        check_nccl(torch.device("cuda", 0))
    with mock.patch.object(dist, "is_nccl_available", return_value=True):
        check_nccl(torch.device("cuda", 0))
