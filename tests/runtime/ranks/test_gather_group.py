"""Gathers between threads as ranks: every byte arrives, an error is the same on all, and nothing is written late."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from moepass.passes.ir.plan import NO_GATHER_SIGNATURE, BankSpec, GatherSignature
from moepass.passes.ir.shards import Piece
from moepass.runtime.banks.banks import describe_bank, pack_bank
from moepass.runtime.homes.collective import CollectiveTransport
from moepass.runtime.homes.peer_home import GatherPacker
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.gather_group import GatherGroup, Request
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from moepass.runtime.transfer.copying import SlotCopy
from moepass.runtime.transfer.link import Link
from moepass.runtime.transfer.sources import MemorySource
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.emulated_clock import EmulatedClock

T = TypeVar("T")
UNTOUCHED = 0xAB


def _on_ranks(ranks: int, function: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(function, range(ranks)))


def _groups(ranks: int, timeout_s: float = 20.0) -> list[GatherGroup]:
    store = HashStore()

    def join(rank: int) -> GatherGroup:
        return GatherGroup(Rendezvous(store, rank, ranks, timeout_s, "come"), lambda request: f"bank {request[0]}")

    return _on_ranks(ranks, join)


def _error(function: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(PeerError) as caught:
        function(*arguments)
    return str(caught.value)


def _ask_on_and_on(group: GatherGroup) -> None:
    while True:
        group.ask((5, 0, 8), True)


@st.composite
def _spread_banks(draw: st.DrawFn) -> tuple[list[int], dict[str, torch.Tensor], list[bool]]:
    """Draw bounds of each rank's experts, the tensors of a bank, and the ranks that want it."""
    experts, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cuts = draw(st.lists(st.integers(0, experts), min_size=ranks - 1, max_size=ranks - 1))
    shapes = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=3))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in shapes]
    tensors = {
        f"tensor_{index}": torch.randn(experts, *shape).to(dtype)
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    wants = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
    return [0, *sorted(cuts), experts], tensors, wants


def _packed(
    store: HashStore, rank: int, bounds: list[int], tensors: dict[str, torch.Tensor], link: Link
) -> tuple[CollectiveTransport, BankSpec, Any]:
    """Return transport, bank and sources of one rank, which has its experts of `tensors`."""
    transport = CollectiveTransport(link)
    group = PeerGroup(store, rank, len(bounds) - 1, 20, transport="collective")
    packer = GatherPacker(group, transport, torch.device("cpu"))
    spec = describe_bank(0, "layers.0", tensors, home="peer", expert_bounds=tuple(bounds))
    packer.agree_on([spec], ["same"])
    bank = packer.pack(0, "layers.0", tensors)
    packer.connect([bank])
    return transport, spec, packer.home.sources(spec, [bank.shard])


@settings(max_examples=20, deadline=None)
@given(_spread_banks())
def test_every_byte_arrives_at_its_offset_only(
    case: tuple[list[int], dict[str, torch.Tensor], list[bool]],
) -> None:
    bounds, tensors, wants = case
    store = HashStore()
    complete = pack_bank(0, "layers.0", tensors, home="host")

    def gather(rank: int) -> None:
        transport, spec, sources = _packed(store, rank, bounds, tensors, Link())
        last = spec.tensors[-1]
        if not wants[rank]:
            transport.join([spec])
            transport._runs[(0, 0, spec.format.link_bytes)] = [(0, last.offset_bytes, last.offset_bytes + last.nbytes)]
            transport.join([spec])
            return
        slot = torch.full((spec.format.link_bytes + 64,), UNTOUCHED, dtype=torch.uint8)
        transport.copy_thread(Link()).submit(SlotCopy(sources, slot, spec.name, transport.action(spec, sources))).wait()
        for tensor, expected in zip(spec.tensors, complete.views(complete.shard), strict=True):
            assert torch.equal(tensor.view(slot), expected)
            tensor.view(slot).view(torch.uint8).fill_(UNTOUCHED)
        assert bool((slot == UNTOUCHED).all())
        read = transport.read(spec, sources, last.offset_bytes, last.offset_bytes + last.nbytes, torch.device("cpu"))
        assert torch.equal(read.view(last.torch_dtype).view(last.shape), tensors[last.name])

    _on_ranks(len(wants), gather)


@pytest.mark.parametrize(("slow", "seconds"), [(0, 0.1), (1, 0.3)])
def test_an_emulated_link_counts_the_bytes_of_other_ranks(
    slow: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EmulatedClock(monkeypatch)
    tensors = {"up": torch.zeros(4, 250)}  # 4000 bytes, of which rank 0 lacks 1000 and rank 1 lacks 3000
    store = HashStore()

    def gather(rank: int) -> None:
        link = Link(10_000.0) if rank == slow else Link()
        transport, spec, sources = _packed(store, rank, [0, 3, 4], tensors, link)
        slot = torch.empty(spec.format.link_bytes, dtype=torch.uint8)
        transport.copy_thread(Link()).submit(SlotCopy(sources, slot, spec.name, transport.action(spec, sources))).wait()

    _on_ranks(2, gather)
    assert clock.seconds == pytest.approx(seconds)


def test_ranks_that_ask_for_different_things_get_one_error_for_good() -> None:
    groups = _groups(3)
    assert _on_ranks(3, lambda rank: groups[rank].ask((5, 0, 8), rank != 1)) == [
        {1: False, 2: True}, {0: True, 2: True}, {0: True, 1: False},
    ]  # fmt: skip
    requests: list[Request] = [(5, 0, 8), (5, 0, 8), (6, 0, 8)]
    texts = set(_on_ranks(3, lambda rank: _error(groups[rank].ask, requests[rank], True)))
    (text,) = texts
    assert text.startswith("ranks disagree on what they gather: bank 5 on rank 0, bank 6 on rank 2; with transport")
    assert "a rank without work must call moepass.gather_only_step(model)" in text
    assert {_error(group.ask, (5, 0, 8), True) for group in groups} == texts
    assert {_error(group.check) for group in groups} == texts


def test_ranks_that_gather_by_different_plans_get_one_error_for_good() -> None:
    groups = _groups(3)
    first_plan, second_plan = GatherSignature(7, 3, 2), GatherSignature(8, 1, 1)
    plans = [first_plan, NO_GATHER_SIGNATURE, first_plan]  # rank 1 only helps the others, which needs no plan
    assert _on_ranks(3, lambda rank: groups[rank].ask((5, 0, 8), rank != 1, plans[rank]))[0] == {1: False, 2: True}
    plans = [NO_GATHER_SIGNATURE, first_plan, second_plan]
    texts = set(_on_ranks(3, lambda rank: _error(groups[rank].ask, (5, 0, 8), True, plans[rank])))
    (text,) = texts
    assert text.startswith(
        "ranks disagree on the plan by which they gather bank 5: 3 gathers through 2 slots on rank 1, 1 gathers "
    )
    assert {_error(group.check) for group in groups} == texts


def test_a_gather_outside_of_a_run_follows_no_plan() -> None:
    spec = describe_bank(0, "bank", {"up": torch.zeros(2, 4)}, home="peer", expert_bounds=(0, 2))
    transport = CollectiveTransport(Link())
    transport.connect(Rendezvous(HashStore(), 0, 1, 20.0, "come"))
    shard = torch.zeros(spec.format.link_bytes, dtype=torch.uint8)
    sources = (MemorySource(shard, (Piece(0, 0, shard.numel()),), over_link=False),)
    transport.add(spec, sources)
    plan = GatherSignature(7, 1, 1)

    def gathered_by() -> GatherSignature:
        return transport.action(spec, sources).plan

    transport.begin_run(plan)
    assert gathered_by() == plan
    transport.end_run()
    assert gathered_by() == NO_GATHER_SIGNATURE
    transport.begin_run(plan)
    transport.fail("by hand")
    assert gathered_by() == NO_GATHER_SIGNATURE


def test_a_rank_that_does_not_come_is_named_within_the_timeout() -> None:
    groups = _groups(3, timeout_s=0.4)
    texts = _on_ranks(2, lambda number: _error(groups[(0, 2)[number]].ask, (5, 0, 8), True))
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 did not start to gather bank 5 within 0.4 s. With transport 'collective' all")
    assert _error(groups[1].ask, (5, 0, 8), True) == texts[0]


def test_a_failure_wakes_waiting_ranks_and_reaches_all() -> None:
    groups = _groups(3)
    texts: dict[int, str] = {}
    waiting = [
        threading.Thread(target=lambda rank=rank: texts.update({rank: _error(_ask_on_and_on, groups[rank])}))
        for rank in (0, 2)
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)  # the threads probably wait by then; the outcome is the same if not
    assert str(groups[0].fail(PeerError("by hand", rank=0))) == "by hand"
    assert str(groups[0].fail(PeerError("another reason"))) == "by hand"
    waiting[0].join()
    # Rank 2 may still wait for rank 1, which gets the error as soon as it comes.
    assert _error(groups[1].ask, (5, 0, 8), True) == "by hand"
    with refused(PeerError, rank=0, ranks=None):
        groups[1].check()
    waiting[1].join()
    assert texts == {0: "by hand", 2: "by hand"}


def test_nothing_is_written_after_a_gather_has_failed() -> None:
    groups = _groups(2, timeout_s=0.4)
    slot = torch.full((1 << 20,), UNTOUCHED, dtype=torch.uint8)
    payload = torch.zeros(1 << 20, dtype=torch.uint8)
    has_failed = threading.Event()

    def exchange(rank: int) -> str:
        groups[rank].ask((5, 0, 8), True)
        if rank == 0:
            text = _error(groups[0].gather, (5, 0, 8), {1: []}, {1: [slot]})
            has_failed.set()
            return text
        assert has_failed.wait(10)
        return _error(groups[1].gather, (5, 0, 8), {0: [payload]}, {})

    texts = set(_on_ranks(2, exchange))
    assert texts == {"rank 1 did not bring its part of bank 5 within 0.4 s (transport 'collective')"}
    assert bool((slot == UNTOUCHED).all())


def test_a_gather_that_fails_on_one_rank_fails_on_the_others() -> None:
    tensors, store = {"up": torch.zeros(4, 250)}, HashStore()

    def gather(rank: int) -> str:
        transport, spec, sources = _packed(store, rank, [0, 2, 4], tensors, Link())
        slot = torch.full((spec.format.link_bytes // (rank + 1),), UNTOUCHED, dtype=torch.uint8)
        return _error(
            transport.copy_thread(Link())
            .submit(SlotCopy(sources, slot, spec.name, transport.action(spec, sources)))
            .wait
        )

    (text,) = set(_on_ranks(2, gather))
    assert text.startswith("rank 1 could not gather bank layers.0: ")


def test_connections_end_with_their_transport() -> None:
    transport, _, _ = _packed(HashStore(), 0, [0, 4], {"up": torch.zeros(4, 8)}, Link())
    group = weakref.ref(transport._group)
    gc.disable()
    try:
        del transport
        assert group() is None
    finally:
        gc.enable()


def test_a_rank_whose_group_was_freed_is_missed() -> None:
    groups: list[Any] = _groups(2)
    groups[1] = None
    text = _error(groups[0].ask, (5, 0, 8), True)
    assert text.startswith(
        "rank 1 has ended or dropped its model: the connection to it (transport 'collective') was lost"
    )


def test_ranks_that_do_not_connect_are_an_error_within_the_timeout() -> None:
    text = _error(GatherGroup, Rendezvous(HashStore(), 0, 2, 0.5, "come"), str)
    assert text.startswith("rank 0 could not connect to all of the 2 ranks for transport 'collective' within 0.5 s: ")
