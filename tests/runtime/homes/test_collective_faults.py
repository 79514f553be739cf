"""Failures with transport `collective`: one clear error on every rank, in time, and no process left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.runtime.execute.bound_graph import SegmentError
from moepass.runtime.homes import peer_home
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.backend_helper import tokens
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.processes.collective_helper import (
    SMALL,
    adopted_model,
    bias_stack,
    compiled_model,
    hidden_states,
    offload_collective,
)
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.processes.workers import Worker, join_group

ATTEMPTS = 6


def _errors(*attempts: Callable[[], object]) -> list[str]:
    """Return the error that each of the calls raises, one after the other."""
    errors = []
    with torch.no_grad():
        for attempt in attempts:
            with pytest.raises(PeerError) as caught:
                attempt()
            errors.append(str(caught.value))
            assert caught.value.ranks == (0, 1)
    return errors


def _order_differs() -> list[str]:
    rank = dist.get_rank()
    model = bias_stack(depth=2)
    offload_collective(model)
    return _errors(
        lambda: model.blocks[rank].up,
        lambda: model(tokens()),
        lambda: compiled_model(model)(tokens()),
    )


def test_another_order_is_one_error_on_all_ranks_and_never_other_weights() -> None:
    first, second = run_ranks(2, _order_differs)
    assert first == second
    assert len(set(first)) == 1
    assert first[0].startswith(
        "ranks disagree on what they gather: bank blocks.0 on rank 0, bank blocks.1 on rank 1; with transport "
    )


def _plans_differ() -> list[str]:
    model = bias_stack(depth=3)
    offload_collective(model, slots=2 + dist.get_rank())
    with torch.no_grad():
        if dist.get_rank() == 0:
            moepass.gather_only_step(model)  # has no plan, so it matches every plan
        else:
            compiled_model(model)(tokens())
    return _errors(lambda: compiled_model(model)(tokens()), lambda: model(tokens()))


@pytest.mark.slow
def test_another_plan_is_one_error_on_all_ranks_before_the_first_bank_comes() -> None:
    first, second = run_ranks(2, _plans_differ)
    assert first == second
    assert len(set(first)) == 1
    assert first[0].startswith(
        "ranks disagree on the plan by which they gather bank blocks.0: 3 gathers through 2 slots on rank 0, 3 gathers "
    )


def _a_rank_runs_fewer_steps() -> str:
    model = bias_stack(depth=2)
    offload_collective(model, timeout_s=1.0)
    with torch.no_grad():
        model(tokens())
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(1.8)  # longer than the others wait
        with pytest.raises(PeerError) as caught:
            model(tokens())
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_runs_fewer_steps_is_named_within_the_timeout() -> None:
    first, second = run_ranks(2, _a_rank_runs_fewer_steps)
    assert first == second
    assert first.startswith("rank 1 did not start to gather bank blocks.0 within 1 s. With transport 'collective' all")
    assert "call moepass.gather_only_step(model) on a rank without work" in first


def _one_drops_its_model() -> str:
    model = bias_stack()
    threads = threading.active_count()
    offload_collective(model)
    with torch.no_grad():
        compiled = compiled_model(model)
        compiled(tokens())
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(PeerError) as caught:
                _run_on_and_on(compiled)
            return str(caught.value)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:  # the copy thread ends soon
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ""


@pytest.mark.slow
def test_a_model_that_is_dropped_leaves_nothing_and_is_missed() -> None:
    text, _ = run_ranks(2, _one_drops_its_model)
    assert text.startswith(
        "rank 1 has ended or dropped its model: the connection to it (transport 'collective') was lost"
    )


def _run_on_and_on(run: Callable[..., Any]) -> None:
    """Run steps until another rank fails at the end of one, which this rank still finishes."""
    while True:
        run(tokens())


class _Broken(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        raise ZeroDivisionError("by hand")


def _one_fails_in_the_middle(number: int) -> list[str]:
    """Return the errors of three calls, which must come at once; rank 1 fails in segment `number` of its second run."""
    rank = dist.get_rank()
    model = bias_stack(depth=4)
    with torch.no_grad():
        expected = model(tokens())
        offload_collective(model)
        with moepass.record_compilations() as compilations:
            compiled = compiled_model(model)
            assert torch.equal(compiled(tokens()), expected)
        modules = compilations[0].executor.graph_module.modules()
        located: Any = [module for module in modules if type(module).__name__ == "SegmentCall"][number]
        dist.barrier()
        errors = []
        if rank == 1:
            original, located.segment = located.segment, _Broken()
            with pytest.raises(SegmentError, match="by hand"):
                compiled(tokens())
            located.segment = original
        for run in (compiled, compiled, model):
            with pytest.raises(PeerError) as caught:
                _run_on_and_on(run)
            errors.append(str(caught.value))
            assert caught.value.rank == 1
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 2, -1])
def test_an_exception_on_one_rank_is_one_error_on_the_others_for_good(number: int) -> None:
    outcomes = run_ranks(3, _one_fails_in_the_middle, number)
    (text,) = {error for errors in outcomes for error in errors}
    assert text.startswith("rank 1 left a run in the middle, so that no rank can gather: SegmentError: in segment_")


def _one_fails_half_way() -> None:
    model = bias_stack()
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(peer_home, "write_parts", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                offload_collective(model)
        return
    with refused(PeerError, rank=1):
        offload_collective(model)
    with torch.no_grad(), refused(PeerError, name="blocks.0"):
        compiled_model(model)(tokens())


def test_a_rank_that_fails_while_it_packs_is_one_error_on_the_others() -> None:
    run_ranks(2, _one_fails_half_way)


def _transports_differ() -> str:
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(
            bias_stack(), home=moepass.Peer(transport=["pull", "collective"][dist.get_rank()], timeout_s=50)
        )
    return str(caught.value)


def test_ranks_with_different_transports_get_an_error() -> None:
    assert set(run_ranks(2, _transports_differ)) == {
        "ranks disagree on the transport: pull on rank 0, collective on rank 1; give every rank the same model and "
        "checkpoint, in one group on one machine"
    }


def _serve(connection: Connection, store: str, rank: int, size: int, mode: str) -> None:
    """Run a step on each command, and answer with its outcome."""
    join_group(store, rank, size)
    step: Callable[..., Any]
    if mode == "adopted":
        inputs, expected = hidden_states(SMALL, 8, rank), build_stack(SMALL)(hidden_states(SMALL, 8, rank))
        step = adopted_model(SMALL)
    else:
        model = bias_stack()
        inputs, expected = tokens(), model(tokens())
        offload_collective(model)
        step = compiled_model(model) if mode == "compiled" else model
    connection.send("ready")
    while connection.recv() == "run":
        try:
            connection.send("exact" if torch.equal(step(inputs), expected) else "wrong")
        except PeerError as error:
            connection.send(str(error))


@pytest.mark.parametrize(
    "mode",
    ["eager", pytest.param("compiled", marks=pytest.mark.slow), pytest.param("adopted", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_one_error_on_the_others_at_once(mode: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with (
        Worker(_serve, store, 0, 3, mode) as first,
        Worker(_serve, store, 1, 3, mode) as killed,
        Worker(_serve, store, 2, 3, mode) as last,
    ):
        everybody, survivors = (first, killed, last), (first, last)
        assert {worker.hear() for worker in everybody} == {"ready"}
        for worker in everybody:
            worker.tell("run")
        assert {worker.hear() for worker in everybody} == {"exact"}
        killed.kill()
        texts = set()
        for _ in range(2):
            for worker in survivors:
                worker.tell("run")
            texts |= {worker.hear() for worker in survivors}
        (text,) = texts
        assert text.startswith(
            "rank 1 has ended or dropped its model: the connection to it (transport 'collective') was lost"
        )
        for worker in survivors:
            worker.tell("end")
            worker.process.join(20)
            assert worker.process.exitcode == 0


def _run_until_an_error(connection: Connection, store: str, rank: int, size: int, mode: str) -> None:
    join_group(store, rank, size)
    model = bias_stack()
    expected = model(tokens())
    connection.send("joined")
    try:
        offload_collective(model, timeout_s=5)
        step = compiled_model(model) if mode == "compiled" else model
        while torch.equal(step(tokens()), expected):
            pass
        connection.send("wrong")
    except PeerError as error:
        connection.send(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(ATTEMPTS))
def test_a_rank_may_be_killed_at_any_moment(attempt: int, tmp_path: Path) -> None:
    store, mode = str(tmp_path / "store"), ["eager", "compiled"][attempt % 2]
    # One moment in each of equal parts of the time that a run of each mode takes.
    moment = {"eager": 0.3, "compiled": 3.0}[mode] * (attempt + random.Random(attempt).random()) / ATTEMPTS
    with (
        Worker(_run_until_an_error, store, 0, 3, mode) as first,
        Worker(_run_until_an_error, store, 1, 3, mode) as killed,
        Worker(_run_until_an_error, store, 2, 3, mode) as last,
    ):
        for worker in (first, killed, last):
            assert worker.hear() == "joined"
        time.sleep(moment)  # the rank is killed at this moment of its run
        killed.kill()
        for worker in (first, last):
            text = worker.hear()
            assert "rank 1" in text or "could not connect to all" in text
            worker.process.join(20)
            assert worker.process.exitcode == 0
