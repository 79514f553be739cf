"""Home `peer` on real ranks: exact, without waits for each other after the start, with clear errors for lost ranks."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.homes import peer_home
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.processes.workers import Worker, join_group, named_memory

SPREAD = {"peer": moepass.Peer, "hybrid": moepass.Hybrid}
ATTEMPTS = 5

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def _compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True, **options})


def _stack(form: str = "dense_bmm", depth: int = 2) -> Stack:
    torch.manual_seed(0)
    torch.manual_seed(0)
    return Stack(form, depth=depth, bias=True)


def _check_figures(store: BankStore, rank: int, ranks: int) -> None:
    """Check the bytes at rest, and those over the link: all but this rank's own."""
    shard_bytes = complete = 0
    for bank in store.banks:
        bounds = bank.spec.expert_bounds
        assert len(bounds) == ranks + 1
        assert bank.spec.home == "peer"
        for tensor in bank.spec.tensors:
            complete += tensor.nbytes
            shard_bytes += tensor.nbytes // tensor.shape[0] * (bounds[rank + 1] - bounds[rank])
    assert shard_bytes <= store.home_bytes <= shard_bytes + 256 * sum(len(bank.spec.tensors) for bank in store.banks)
    statistics = store.ring().statistics
    assert statistics.copied_bytes * (complete - shard_bytes) == statistics.link_bytes * complete


def _model_stays_exact(family: str, overrides: dict[str, Any]) -> None:
    model: nn.Module = _stack(family) if family in BLOCKS else tiny_model(family, **overrides)
    inputs = {"x": tokens()} if family in BLOCKS else tiny_inputs(model)  # type: ignore[arg-type]

    def run(model: Callable[..., Any]) -> torch.Tensor:
        output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[no-any-return]

    with torch.no_grad():
        expected = run(model)
        report = moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        assert report.home == "peer"
        assert torch.equal(run(model), expected)
        with moepass.record_compilations() as compilations:
            compiled = _compiled(model)
            for _ in range(3):
                assert torch.equal(run(compiled), expected)
    (compilation,) = compilations
    assert [bank.expert_bounds for bank in compilation.plan.banks] == [b.spec.expert_bounds for b in report.store.banks]
    assert not compilation.plan.refusals
    # All banks have one size, so the same fraction of every copy came from other ranks.
    _check_figures(report.store, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize(
    ("ranks", "family", "overrides"),
    [
        pytest.param(1, "dense_bmm", {}, marks=pytest.mark.slow),
        pytest.param(2, "batched_mm", {}, marks=pytest.mark.slow),
        (3, "grouped_mm", {}),  # 4 experts on 3 ranks
        pytest.param(2, "qwen3_moe", {"num_hidden_layers": 2}, marks=pytest.mark.slow),
        pytest.param(3, "qwen3_moe", {}, marks=pytest.mark.slow),  # 8 experts on 3 ranks
        pytest.param(  # a rank without experts
            3,
            "qwen3_moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_stay_exact_on_every_rank(ranks: int, family: str, overrides: dict[str, Any]) -> None:
    run_ranks(ranks, _model_stays_exact, family, overrides)


def _reads_outside_blocks_are_complete() -> None:
    with torch.no_grad():
        model = _stack(depth=2)
        expected = model(tokens())
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        with moepass.record_compilations() as compilations:
            compiled = _compiled(model, disable=["rewrite", "plan", "schedule", "verify"])
            for _ in range(2):
                assert torch.equal(compiled(tokens()), expected)
        assert "read_bank_tensor" in compilations[0].executor.graph_module.code
        torch._dynamo.reset()
        with pytest.raises(moepass.MoepassError, match=r"blocks\.0 is sharded over 2 ranks.*backend='asyncep'"):
            torch.compile(model, backend="aot_eager")(tokens())


@pytest.mark.slow
def test_reads_outside_recognised_blocks_are_complete_or_refused() -> None:
    run_ranks(2, _reads_outside_blocks_are_complete)


def _graph_breaks_are_exact() -> None:
    with torch.no_grad():
        model = tiny_model("qwen3_moe", experts_implementation="eager")
        inputs = tiny_inputs(model)
        expected = model(**inputs).logits
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        assert torch.equal(_compiled(model)(**inputs).logits, expected)


@pytest.mark.slow
def test_the_data_dependent_expert_loop_stays_exact() -> None:
    run_ranks(2, _graph_breaks_are_exact)


def _complete_experts_are_freed() -> None:
    model = _stack(depth=3)
    weights = [weakref.ref(value.untyped_storage()) for name, value in model.named_parameters() if "blocks" in name]
    report = moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
    gc.collect()
    assert [storage() for storage in weights if storage() is not None] == []
    assert not any("blocks" in name and value.numel() for name, value in model.named_parameters())
    with pytest.raises(moepass.InputError, match=r"rank 0|this rank has only its own shard"):
        model.state_dict()
    with pytest.raises(moepass.InputError, match="this rank has only its own shard"):
        model.load_state_dict({"blocks.0.up": torch.zeros(1)}, strict=False)
    assert model.load_state_dict(model.linears.state_dict(prefix="linears."), strict=False).unexpected_keys == []
    assert report.home_bytes < report.store.slot_bytes * len(report.layers) * 0.6


def test_only_the_own_shards_stay() -> None:
    run_ranks(2, _complete_experts_are_freed)


def _one_runs_and_one_is_idle() -> None:
    store = dist.distributed_c10d._get_default_store()
    with torch.no_grad():
        model = _stack()
        expected = model(tokens())
        store_of_banks = weakref.ref(moepass.offload_experts(model, home=moepass.Peer(timeout_s=50)).store)
        compiled = _compiled(model)
        if dist.get_rank() == 0:
            for _ in range(10):
                assert torch.equal(compiled(tokens()), expected)
            store.set("ten steps", "done")
            # Its shards stay readable even when the model is gone.
            del model, compiled
            gc.collect()
            assert store_of_banks() is None
            store.set("model", "gone")
            store.wait(["the other"], timedelta(seconds=50))
        else:
            store.wait(["ten steps", "model"], timedelta(seconds=50))
            for _ in range(2):
                assert torch.equal(compiled(tokens()), expected)
            assert torch.equal(model(tokens()), expected)
            store.set("the other", "done")


@pytest.mark.slow
def test_an_idle_rank_neither_waits_nor_is_waited_for() -> None:
    run_ranks(2, _one_runs_and_one_is_idle)


def _differs(what: str) -> tuple[str, bool]:
    """Return the error of this rank, and whether its model is unchanged."""
    rank = dist.get_rank()
    model: nn.Module = _stack(depth=2 + (rank if what == "depth" else 0))
    if what == "weights":
        with torch.no_grad():
            model.blocks[1].down.mul_(rank + 1)  # type: ignore[index, union-attr]
    before = model(tokens())
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
    return str(caught.value), torch.equal(model(tokens()), before)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("depth", "ranks disagree on the number of banks: 2 on rank 0, 3 on rank 1; give every rank the same model"),
        ("weights", "ranks disagree on the weights of bank blocks.1 (a digest): "),
    ],
)
def test_different_models_are_one_error_on_all_ranks_and_leave_them_alone(what: str, message: str) -> None:
    outcomes = run_ranks(2, _differs, what)
    assert len({text for text, _ in outcomes}) == 1
    assert outcomes[0][0].startswith(message)
    assert all(is_as_it_was for _, is_as_it_was in outcomes)


def _one_fails_half_way() -> None:
    model = _stack()
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(peer_home, "write_parts", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        return
    with pytest.raises(PeerError, match=r"^rank 1 failed: MemoryError: no room$"):
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
    incomplete = r"bank blocks\.0 is not complete, because offload_experts failed; start all ranks again"
    with torch.no_grad():
        with pytest.raises(PeerError, match=incomplete):
            model(tokens())
        with pytest.raises(PeerError, match=incomplete):
            _compiled(model)(tokens())


def test_a_rank_that_fails_half_way_is_one_error_on_the_others_and_never_a_wrong_result() -> None:
    run_ranks(2, _one_fails_half_way)


def _only_some_offload() -> str | None:
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["the others gave up"], timedelta(seconds=50))
        return None
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(_stack(), home=moepass.Peer(timeout_s=0.5))
    store = dist.distributed_c10d._get_default_store()
    if store.add("gave up", 1) == 2:
        store.set("the others gave up", "")
    return str(caught.value)


def test_a_rank_that_never_offloads_is_named() -> None:
    first, absent, last = run_ranks(3, _only_some_offload)
    assert absent is None
    assert first == last
    assert first.startswith(
        "rank 1 did not publish a plan of its layers within 0.5 s; every rank of the group must call"
    )


def _comes_too_late(transport: str) -> list[str]:
    """Return the error of each attempt after rank 0 has given up. No attempt changes the model."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 gave up"], timedelta(seconds=50))
    model, texts = _stack(), []
    before = model(tokens())
    for timeout_s in (0.5, 50):
        with pytest.raises(PeerError) as caught:
            moepass.offload_experts(model, home=moepass.Peer(timeout_s=timeout_s, transport=transport))
        texts.append(str(caught.value))
        assert torch.equal(model(tokens()), before)
        assert all(value.numel() for value in model.parameters())
        store.set("rank 0 gave up", "")
    return texts


@pytest.mark.parametrize("transport", ["pull", "collective"])
def test_a_rank_that_comes_too_late_keeps_its_model(transport: str) -> None:
    (first, again), late = run_ranks(2, _comes_too_late, transport)
    assert first.startswith(
        "rank 1 did not publish a plan of its layers within 0.5 s; every rank of the group must call"
    )
    for text in (again, *late):
        assert f"got out of step before, and cannot meet any more: {first}; start all ranks again, or let" in text


def _in_a_subgroup() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    with torch.no_grad():
        model = _stack(depth=1)
        expected = model(tokens())
        mine, foreign = groups[dist.get_rank() % 2], groups[1 - dist.get_rank() % 2]
        with pytest.raises(moepass.InputError, match="not a process group with this process in it"):
            moepass.offload_experts(model, home=moepass.Peer(group=foreign))
        report = moepass.offload_experts(model, home=moepass.Peer(group=mine, timeout_s=50))
        assert len(report.store.banks[0].spec.expert_bounds) == mine.size() + 1
        assert torch.equal(model(tokens()), expected)


def test_experts_spread_over_the_ranks_of_a_group() -> None:
    run_ranks(3, _in_a_subgroup)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, moepass.InputError, r"torch\.distributed, which is not initialised; launch with torchrun"),
        ({"device": "meta"}, moepass.InputError, r"device is meta; home='peer' works on cpu and cuda only"),
    ],
)
def test_wrong_arguments_leave_the_model_alone(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = _stack()
    before = model(tokens())
    with pytest.raises(kind, match=message):
        moepass.offload_experts(model, **{"home": "peer", **arguments})
    assert torch.equal(model(tokens()), before)


def _serve(connection: Connection, store: str, rank: int, size: int, mode: str, home: str = "peer") -> None:
    """Follow commands: `run` answers with the outcome of a step, `leave` drops the model."""
    join_group(store, rank, size)
    model: nn.Module | None = _stack()
    expected = model(tokens())
    moepass.offload_experts(model, home=SPREAD[home](timeout_s=50))
    step: Callable[..., Any] | None = _compiled(model) if mode == "compiled" else model
    connection.send("ready")
    while (order := connection.recv()) != "end":
        if order == "leave":
            step = model = None
            torch._dynamo.reset()
            gc.collect()
            connection.send("left")
            continue
        try:
            connection.send("exact" if torch.equal(step(tokens()), expected) else "wrong")
        except PeerError as error:
            connection.send(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "home"), [("compiled", "peer"), ("eager", "peer"), ("compiled", "hybrid")])
def test_a_killed_rank_is_an_error_on_the_others_at_once_and_leaves_nothing(
    mode: str, home: str, tmp_path: Path
) -> None:
    named = named_memory()
    store = str(tmp_path / "store")
    with (
        Worker(_serve, store, 0, 3, mode, home) as first,
        Worker(_serve, store, 1, 3, mode, home) as killed,
        Worker(_serve, store, 2, 3, mode, home) as last,
    ):
        for worker in (first, killed, last):
            assert worker.hear() == "ready"
        for worker in (first, last):
            worker.tell("run")
            assert worker.hear() == "exact"
        pid = killed.process.pid
        killed.kill()
        for _ in range(2):
            for worker in (first, last):
                worker.tell("run")
                assert worker.hear().startswith(f"rank 1 (process {pid}) is gone, after a signal or an error")
        # The survivors end without a signal.
        for worker in (first, last):
            worker.tell("end")
            worker.process.join(20)
            assert worker.process.exitcode == 0
    assert named_memory() <= named


def _run_until_an_error(connection: Connection, store: str, rank: int, size: int, home: str) -> None:
    join_group(store, rank, size)
    model = _stack()
    expected = model(tokens())
    connection.send("joined")
    try:
        moepass.offload_experts(model, home=SPREAD[home](timeout_s=5))
        while torch.equal(model(tokens()), expected):
            pass
        connection.send("wrong")
    except PeerError as error:
        connection.send(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("home", ["peer", "hybrid"])
@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_a_rank_may_be_killed_at_any_moment(attempt: int, home: str, tmp_path: Path) -> None:
    named, store = named_memory(), str(tmp_path / "store")
    # One moment in each of equal parts of 0.2 s.
    moment = 0.2 * (attempt + random.Random(attempt).random()) / ATTEMPTS
    with (
        Worker(_run_until_an_error, store, 0, 3, home) as first,
        Worker(_run_until_an_error, store, 1, 3, home) as killed,
        Worker(_run_until_an_error, store, 2, 3, home) as last,
    ):
        for worker in (first, killed, last):
            assert worker.hear() == "joined"
        time.sleep(moment)  # the rank is killed at this moment of its meeting
        killed.kill()
        errors = [first.hear(), last.hear()]
        # A slow survivor may first notice that the other survivor has given up.
        assert any("rank 1" in text for text in errors)
        assert all("rank 1" in text or "is gone" in text for text in errors)
        for worker in (first, last):
            worker.process.join(20)
            assert worker.process.exitcode == 0
    assert named_memory() <= named


@pytest.mark.slow
def test_a_rank_that_drops_its_model_and_ends_is_not_missed(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Worker(_serve, store, 0, 2, "eager") as stays, Worker(_serve, store, 1, 2, "eager") as leaves:
        for worker in (stays, leaves):
            assert worker.hear() == "ready"
        leaves.tell("leave")
        assert leaves.hear() == "left"
        stays.tell("run")
        assert stays.hear() == "exact"
        leaves.kill()
        stays.tell("run")
        assert stays.hear() == "exact"


_SCRIPT = f"import sys; from {__name__} import script; script(*sys.argv[1:])"


def script(store: str, rank: str, how: str) -> None:
    """Return a script in which rank 1 ends while its model lives, and rank 0 prints the outcome of a step."""
    join_group(store, int(rank), 2)
    with torch.no_grad():
        model = _stack()
        expected = model(tokens())
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        print("ready", flush=True)
        if rank == "1":
            if how == "exception":
                raise ZeroDivisionError("by hand")
            return
        sys.stdin.readline()
        try:
            print("exact" if torch.equal(model(tokens()), expected) else "wrong")
        except PeerError as error:
            print(error)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "answer"), [("normally", "exact"), ("exception", "rank 1 (process")])
def test_a_process_that_ends_with_an_exception_is_missed_and_one_that_is_done_is_not(
    how: str, answer: str, tmp_path: Path
) -> None:
    commands = [[sys.executable, "-c", _SCRIPT, str(tmp_path / "store"), str(rank), how] for rank in range(2)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = [subprocess.Popen(command, **pipes, text=True, env=paths) for command in commands]
    try:
        ranks[1].communicate(timeout=100)
        assert ranks[1].returncode == (1 if how == "exception" else 0)
        output, _ = ranks[0].communicate("go\n", timeout=100)
        assert output.splitlines()[-1].startswith(answer)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
