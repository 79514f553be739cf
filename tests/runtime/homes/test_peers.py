"""Meetings of ranks: all agree or get the same error, every wait ends, and a rank that dies is noticed."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.models.errors import InputError, OptionError
from moepass.models.layouts.layout import Role
from moepass.passes.ir.plan import BankSpec, DecodedPart
from moepass.runtime.banks.banks import describe_bank
from moepass.runtime.homes import peers
from moepass.runtime.homes.peer_home import weights_digest
from moepass.runtime.homes.peers import PeerGroup
from moepass.runtime.ranks.agree import DisagreementError
from moepass.runtime.ranks.rendezvous import PeerError, Rendezvous
from moepass.runtime.system.processes import ProcessIdentity, this_process
from moepass.runtime.system.shared_memory import PAGE_BYTES
from tests.helpers.graphs.error_fields import refused
from tests.helpers.processes.rank_threads import on_rank_threads
from tests.helpers.processes.workers import Worker

ENDED = "the ranks of this group got out of step before, and cannot meet any more: "


def _bank(index: int = 0, **changes: Any) -> BankSpec:
    tensors = {"up": torch.zeros(4, 6, 8), "down": torch.zeros(4, 8, 3)}
    spec = describe_bank(index, f"layers.{index}", tensors, home="peer", expert_bounds=(0, 2, 4))
    return dataclasses.replace(spec, **changes)


BANKS = (_bank(0), _bank(1))


def _messages(outcomes: Sequence[object]) -> set[str]:
    errors = [outcome for outcome in outcomes if isinstance(outcome, PeerError)]
    assert len(errors) == len(outcomes), outcomes
    assert len({(error.rank, error.ranks) for error in errors}) == 1
    return {str(error) for error in errors}


def _share(store: HashStore, rank: int, size: int) -> tuple[PeerGroup, dict[int, torch.Tensor]]:
    group = PeerGroup(store, rank, size, timeout_s=20)
    group.agree(BANKS, ["a", "b"])
    segment = group.make_segment(100)
    segment.map(PAGE_BYTES, 100).fill_(rank + 1)
    memories = {peer: opened.map(PAGE_BYTES, 100) for peer, opened in group.share().items()}
    group.settle()
    return group, memories


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_sees_the_memory_of_all_others(ranks: int) -> None:
    store = HashStore()
    for _ in range(2):  # a second group on the same store has a separate meeting
        for rank, outcome in enumerate(on_rank_threads(ranks, lambda rank: _share(store, rank, ranks))):
            assert not isinstance(outcome, PeerError)
            group, memories = outcome
            assert {peer: memory.tolist() for peer, memory in memories.items()} == {
                peer: [peer + 1] * 100 for peer in range(ranks) if peer != rank
            }
            group.check_alive()


@pytest.mark.parametrize(
    ("banks", "message"),
    [
        (BANKS[:1], r"ranks disagree on the number of banks: 2 on rank 0, 1 on rank 2"),
        ((BANKS[0], _bank(1, name="x")), r"the name of bank 1: layers\.1 on rank 0, x on rank 2"),
        (
            (BANKS[0], _bank(1, tensors=BANKS[1].tensors[:1])),
            r"the tensors of bank layers\.1: \['up float32 \[4, 6, 8\]', 'down .*'\] on rank 0, "
            r"\['up float32 \[4, 6, 8\]'\] on rank 2",
        ),
        (
            (_bank(0, expert_bounds=(0, 1, 4)), BANKS[1]),
            r"the experts of each rank in bank layers\.0: \[0, 2, 4\] on rank 0, \[0, 1, 4\] on rank 2",
        ),
        (
            (_bank(0, stored=BANKS[0].tensors[:1]), BANKS[1]),
            r"ranks disagree on the stored tensors of bank layers\.0: \[\] on rank 0, "
            r"\['up float32 \[4, 6, 8\]'\] on rank 2; give every rank the same model and checkpoint",
        ),
        (
            (_bank(0, parts=(DecodedPart(BANKS[0].tensors[0], 1, 0, 6, ((Role.VALUES, 0),)),)), BANKS[1]),
            r"ranks disagree on the decoded parts of bank layers\.0: \[\] on rank 0, "
            r"\['indices 0 to 6 of dimension 1 of up: values 0, formula None'\] on rank 2",
        ),
    ],
)
def test_different_banks_are_the_same_error_on_every_rank(banks: tuple[BankSpec, ...], message: str) -> None:
    store = HashStore()

    def run(rank: int) -> None:
        own_banks = banks if rank == 2 else BANKS
        PeerGroup(store, rank, 3, timeout_s=20).agree(own_banks, ["digest"] * len(own_banks))

    (text,) = _messages(on_rank_threads(3, run))
    with pytest.raises(PeerError, match=message):
        raise PeerError(text)


def test_different_weights_differ_in_their_digest() -> None:
    store = HashStore()
    (text,) = _messages(
        on_rank_threads(2, lambda rank: PeerGroup(store, rank, 2, timeout_s=20).agree(BANKS, ["same", f"own{rank}"]))
    )
    assert "the weights of bank layers.1 (a digest): own0 on rank 0, own1 on rank 1; give every rank the same" in text


@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 2, 3), (2, 4, 3)])
def test_different_world_sizes_are_an_error_that_names_both(sizes: tuple[int, ...]) -> None:
    store = HashStore()
    outcomes = on_rank_threads(
        3, lambda rank: PeerGroup(store, rank, sizes[rank], timeout_s=20).agree(BANKS, ["a", "b"])
    )
    (text,) = _messages(outcomes)
    assert f"ranks disagree on the number of ranks: {sizes[0]} on rank 0, {sizes[1]} on rank 1" in text
    with refused(DisagreementError, name="the number of ranks", ranks=(0, 1)):
        raise outcomes[0]  # type: ignore[misc]  # all are errors


def test_other_machines_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = HashStore(), this_process()
    names = iter(["here", "there"])
    monkeypatch.setattr(peers, "this_process", lambda: dataclasses.replace(real, machine=next(names)))
    (text,) = _messages(
        on_rank_threads(2, lambda rank: PeerGroup(store, rank, 2, timeout_s=20).agree(BANKS, ["a", "b"]))
    )
    assert "ranks disagree on the machine: " in text
    assert "in one group on one machine" in text


@pytest.mark.parametrize(
    ("came", "missing", "fields"),
    [
        ((0, 1), "rank 2", (2, None)),
        ((1,), "ranks 0, 2", (None, (0, 2))),
        ((2,), "ranks 0, 1", (None, (0, 1))),
    ],
)
def test_ranks_that_do_not_come_are_named_after_the_timeout(
    came: tuple[int, ...], missing: str, fields: tuple[int | None, tuple[int, ...] | None]
) -> None:
    store = HashStore()
    outcomes = on_rank_threads(
        3, lambda rank: PeerGroup(store, rank, 3, timeout_s=0.3).agree(BANKS, ["a", "b"]) if rank in came else None
    )
    (text,) = _messages([outcomes[rank] for rank in came])
    assert text.startswith(f"{missing} did not publish a list of banks within 0.3 s; every rank of the group must call")
    assert (outcomes[came[0]].rank, outcomes[came[0]].ranks) == fields  # type: ignore[union-attr]  # it is an error


def test_a_rank_that_comes_after_the_others_gave_up_gets_their_error() -> None:
    store = HashStore()
    group = PeerGroup(store, 0, 2, timeout_s=0.1)
    late = PeerGroup(store, 1, 2, timeout_s=20)
    with pytest.raises(PeerError, match=r"^rank 1 did not publish a list of banks within 0\.1 s") as first:
        group.agree(BANKS, ["a", "b"])
    with pytest.raises(PeerError) as second:
        late.agree(BANKS, ["a", "b"])
    assert str(second.value) == str(first.value)
    assert second.value.rank == first.value.rank == 1
    for rank in range(2):
        with pytest.raises(
            PeerError, match=r"got out of step before, and cannot meet any more: rank 1 did not pub"
        ) as ended:
            PeerGroup(store, rank, 2)
        assert ended.value.rank == 1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.03, 0.07), min_size=2, max_size=3))
def test_ranks_that_come_at_the_last_moment_all_agree_or_all_fail(delays_s: list[float]) -> None:
    """Rank 0 waits for 0.05 s, and the others begin to wait while it gives up."""
    store = HashStore()

    def run(rank: int) -> None:
        if rank:
            time.sleep(delays_s[rank - 1])
        PeerGroup(store, rank, len(delays_s) + 1, timeout_s=0.05).agree(BANKS, ["a", "b"])

    outcomes = on_rank_threads(len(delays_s) + 1, run)
    # A rank that comes after the failure gets an error with the same reason.
    reasons = {str(error).removeprefix(ENDED).split("; ")[0] if error else "" for error in outcomes}
    assert len(reasons) == 1, outcomes


def test_after_the_same_error_on_all_ranks_they_can_try_again() -> None:
    store = HashStore()

    def run(rank: int) -> None:
        with refused(DisagreementError, name="the number of banks"):
            PeerGroup(store, rank, 2, timeout_s=20).agree(BANKS[rank:], ["a", "b"][rank:])
        raises = pytest.raises(MemoryError) if rank else refused(PeerError, rank=1)
        with raises:  # type: ignore[attr-defined]  # both are context managers
            rendezvous = PeerGroup(store, rank, 2, timeout_s=20).rendezvous
            with rendezvous.publishing_failures():
                if rank:
                    raise MemoryError
                list(rendezvous.exchange("word", "", str))
        PeerGroup(store, rank, 2, timeout_s=20).agree(BANKS, ["a", "b"])

    assert on_rank_threads(2, run) == [None, None]


def test_a_meeting_that_was_dispensable_and_in_vain_leaves_no_trace() -> None:
    store = HashStore()
    for _ in range(2):
        alone = Rendezvous(store, 0, 2, 0.05, "come", is_optional=True)
        with refused(PeerError, rank=1):
            list(alone.exchange("word", "from 0", str))

    def run(rank: int) -> str:
        meeting = Rendezvous(store, rank, 2, 20, "come")
        return dict(meeting.exchange("word", f"from {rank}", str))[1 - rank]

    assert on_rank_threads(2, run) == ["from 1", "from 0"]


def test_a_failure_of_a_rank_reaches_the_others_at_once() -> None:
    store = HashStore()

    def run(rank: int) -> None:
        group = PeerGroup(store, rank, 2, timeout_s=30)
        group.agree(BANKS, ["a", "b"])
        if rank == 1:
            with pytest.raises(MemoryError), group.rendezvous.publishing_failures():
                raise MemoryError("no room for the shard")
            return
        group.make_segment(10)
        group.share()

    waiting, failed = on_rank_threads(2, run)
    assert failed is None
    assert str(waiting) == "rank 1 failed: MemoryError: no room for the shard"
    assert isinstance(waiting, PeerError)
    assert waiting.rank == 1


def test_a_group_freed_while_torch_traces_says_goodbye_and_is_in_no_graph() -> None:
    """The garbage collector may free a group at any moment."""

    def ends_a_group(rows: torch.Tensor) -> torch.Tensor:
        group.leave()
        return rows + 1

    group = PeerGroup(HashStore(), 0, 1, timeout_s=5)
    state = group.make_segment(10).map(0, 1)
    graph = make_fx(ends_a_group, tracing_mode="fake")(torch.zeros(2)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
    assert int(state) == 1


def test_a_record_of_another_version_is_an_error() -> None:
    store = HashStore()
    peer = Rendezvous(store, 1, 2, 5.0, "come")
    peer.publish("list of banks", {"ranks": 2, "words": []})
    with pytest.raises(PeerError, match=r"rank 1 sent a list of banks that this version of moepass cannot read"):
        PeerGroup(store, 0, 2, timeout_s=5).agree(BANKS, ["a", "b"])


def test_a_store_that_is_gone_is_an_error() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5))
    group = PeerGroup(client, 1, 2, timeout_s=20)
    del server
    gc.collect()
    with pytest.raises(PeerError, match=r"the store of torch\.distributed is gone"):
        group.agree(BANKS, ["a", "b"])


@pytest.mark.parametrize("timeout", [0, -1.0, "60", None, True, float("nan")])
def test_wrong_timeouts_name_themselves(timeout: Any) -> None:
    with refused(OptionError, name="timeout_s"):
        PeerGroup(HashStore(), 0, 1, timeout_s=timeout)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"not initialised; launch with torchrun .*, or use home='host'"):
        PeerGroup.of(None)


def _introduce(connection: Connection) -> None:
    connection.send(this_process())
    connection.recv()


def _introduce_as_second(store: HashStore, process: ProcessIdentity) -> None:
    """Publish the records of `process` as rank 1 of 2."""
    group = PeerGroup(store, 1, 2, 5.0)
    with (
        mock.patch.object(peers, "this_process", return_value=process),
        mock.patch.object(peers, "agree", return_value=()) as agree,
    ):
        group.agree(BANKS, ("a", "b"))
    _, name, topics, _ = agree.call_args.args
    group.rendezvous.publish(name, topics)


def test_a_rank_that_dies_while_others_wait_is_noticed_before_the_time_is_over() -> None:
    """The rank comes to the first meeting, and is killed before it publishes its shards."""
    store = HashStore()
    with Worker(_introduce) as worker:
        process = worker.hear()
        _introduce_as_second(store, process)
        group = PeerGroup(store, 0, 2, timeout_s=30)
        group.agree(BANKS, ["a", "b"])
        group.check_alive()
        group.make_segment(10)
        worker.kill()
        with pytest.raises(PeerError, match=rf"^rank 1 \(process {process.pid}\) is gone, after a signal or an error"):
            group.share()


def test_a_rank_that_died_before_the_others_came_is_no_party_to_an_agreement() -> None:
    store = HashStore()
    with Worker(_introduce) as worker:
        process = worker.hear()
        _introduce_as_second(store, process)
        worker.kill()
        with refused(PeerError, rank=1):
            PeerGroup(store, 0, 2, timeout_s=30).agree(BANKS, ["a", "b"])


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_of_a_waiting_rank_reaches_ranks_that_come_later() -> None:
    store = HashStore()
    with pytest.raises(KeyboardInterrupt):
        list(Rendezvous(store, 0, 2, 20, "come").exchange("word", "", str, _interrupt))
    with pytest.raises(
        PeerError, match="rank 0 was interrupted while it waited for a word; start all ranks again"
    ) as caught:
        Rendezvous(store, 1, 2, 20, "come")
    assert caught.value.rank == 0


def test_digests_depend_on_the_weights_alone() -> None:
    weights = {
        "up": torch.randn(4, 30, 50),
        "down": torch.randn(4, 50, 30).to(torch.bfloat16),
        "bias": torch.randn(4, 9),
    }
    assert weights_digest(weights) == weights_digest({name: value.clone() for name, value in weights.items()})
    transposed = {name: value.transpose(0, -1).contiguous().transpose(0, -1) for name, value in weights.items()}
    assert weights_digest(weights) == weights_digest(transposed)
    for name, value in weights.items():
        assert weights_digest(weights) != weights_digest({**weights, name: value + 1})
    thin = {"gate": torch.randn(4, 9, 1).transpose(1, 2), "up": torch.randn(4, 1, 9).transpose(1, 2)}
    assert weights_digest(thin) == weights_digest({name: value.clone() for name, value in thin.items()})
    one_expert = weights["up"].clone()
    one_expert[2] *= 1.5
    assert weights_digest(weights) != weights_digest({**weights, "up": one_expert})
