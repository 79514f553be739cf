"""Transport `collective` on real ranks: exact, in step with each other, and one clear error for all where it fails."""

from __future__ import annotations

import dataclasses
import gc
import os
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
from backend_helper import Stack, tokens
from ranks import run_ranks
from tiny_checkpoint import save_tiny_checkpoint
from torch import nn
from workers import Worker, join_group

import moepass
from moepass.models.checkpoints import load_model
from moepass.models.moe_stack import StackConfig, build_stack
from moepass.models.tiny import tiny_inputs, tiny_model
from moepass.options import parse_options
from moepass.runtime import peer_home, peers
from moepass.runtime.executor import SegmentError
from moepass.runtime.processes import ProcessError
from moepass.runtime.rendezvous import PeerError
from moepass.runtime.shared_memory import SharedMemoryError

SMALL = StackConfig(layers=2, max_tokens=32)


def _compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True, **options})


def _stack(form: str = "dense_bmm", depth: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(form, depth=depth, bias=True)


def _offload(model: nn.Module, **arguments: Any) -> moepass.OffloadReport:
    return moepass.offload_experts(model, home="peer", transport="collective", **{"timeout_s": 50, **arguments})


def _adopted(config: StackConfig, **options: Any) -> Callable[..., Any]:
    torch._dynamo.config.capture_scalar_outputs = True
    return _compiled(build_stack(config, "all_to_all"), **{"transport": "collective", "timeout_s": 50, **options})


def _hidden(config: StackConfig, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, config.hidden, generator=torch.Generator().manual_seed(seed)).to(config.dtype)


def _no_shared_memory(*_: object) -> Any:
    raise SharedMemoryError("this machine has none")


def _no_watch(*_: object) -> Any:
    raise ProcessError("this machine cannot tell processes apart")


def _offloaded_model_stays_exact(family: str, overrides: dict[str, Any]) -> None:
    model: nn.Module = _stack(family) if family == "grouped_mm" else tiny_model(family, **overrides)
    inputs = {"x": tokens()} if isinstance(model, Stack) else tiny_inputs(model)  # type: ignore[arg-type]

    def run(model: Callable[..., Any]) -> torch.Tensor:
        output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[no-any-return]

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        # What several machines do not have in common.
        patched.setattr(peers, "create_segment", _no_shared_memory)
        patched.setattr(peers, "this_process", _no_watch)
        expected = run(model)
        report = _offload(model)
        assert (report.home, report.transport) == ("peer", "collective")
        for _ in range(2):
            assert torch.equal(run(model), expected)
        with moepass.record_compilations() as compilations:
            compiled = _compiled(model)
            for _ in range(3):
                assert torch.equal(run(compiled), expected)
    assert len(compilations) == 1
    own = complete = 0
    for bank in report.store.banks:
        bounds = bank.spec.expert_bounds
        own += sum(t.nbytes // t.shape[0] * (bounds[rank + 1] - bounds[rank]) for t in bank.spec.tensors)
        complete += sum(tensor.nbytes for tensor in bank.spec.tensors)
    statistics = report.store.ring().statistics
    assert len(bounds) == ranks + 1
    assert statistics.copies == 3 * len(report.layers)
    assert statistics.copied_bytes == 3 * complete
    assert statistics.link_bytes == 3 * (complete - own)


@pytest.mark.parametrize(
    ("ranks", "family", "overrides"),
    [
        pytest.param(1, "grouped_mm", {}, marks=pytest.mark.slow),
        pytest.param(2, "qwen3_moe", {"num_hidden_layers": 2}, marks=pytest.mark.slow),
        (3, "grouped_mm", {}),  # 4 experts on 3 ranks
        (3, "qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}),  # one without experts
    ],
)
def test_offloaded_models_stay_exact_without_memory_in_common(
    ranks: int, family: str, overrides: dict[str, Any]
) -> None:
    run_ranks(ranks, _offloaded_model_stays_exact, family, overrides)


def _adopted_model_stays_exact(config: StackConfig, counts: list[list[int]]) -> None:
    """`counts[step][rank]` tokens in each step; below 0 the rank joins without work."""
    rank = dist.get_rank()
    full = build_stack(config)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = _adopted(config)
        for step, of_ranks in enumerate(counts):
            if of_ranks[rank] < 0:
                moepass.gather_only_step(compiled)  # type: ignore[arg-type]
                continue
            hidden = _hidden(config, of_ranks[rank], 100 * step + rank)
            assert torch.equal(compiled(hidden), full(hidden)), f"step {step}"
    assert all(len(compilation.plan.blocks) == config.layers for compilation in compilations)
    ring = compilations[0].executor.ring
    assert ring is not None
    assert ring.statistics.copies == config.layers * sum(of_ranks[rank] >= 0 for of_ranks in counts)


@pytest.mark.parametrize(
    ("ranks", "config", "counts"),
    [
        (2, SMALL, [[16, 16], [16, -1], [-1, 16]]),
        pytest.param(
            3,
            dataclasses.replace(SMALL, layers=3, experts=7, dtype=torch.bfloat16),
            [[16, 9, 4], [5, 6, 32], [-1, -1, 32], [5, 0, -1]],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["even", "uneven"],
)
def test_adopted_models_stay_exact(ranks: int, config: StackConfig, counts: list[list[int]]) -> None:
    run_ranks(ranks, _adopted_model_stays_exact, config, counts)


def _load_on_a_rank(folder: Path) -> None:
    model = moepass.load_pretrained(folder, home="peer", transport="collective", timeout_s=50)
    assert moepass.offload_report(model).transport == "collective"
    inputs = tiny_inputs(model)
    with torch.no_grad():
        reference = load_model(folder)
        moepass.offload_experts(reference)
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


def test_checkpoints_load_for_collective_too(tmp_path: Path) -> None:
    run_ranks(2, _load_on_a_rank, save_tiny_checkpoint(tmp_path / "checkpoint"))


def _idle_ranks_join(depth: int) -> int:
    """Rank 1 has work now and then, rank 0 in every step; in eager mode first, then compiled."""
    rank = dist.get_rank()
    with torch.no_grad():
        model = _stack(depth=depth)
        expected = model(tokens())
        report = _offload(model, slots=1)
        compiled = _compiled(model)
        for run, idle in [(model, "+-+-"), (compiled, "--++-+"), (model, "+-"), (compiled, "-+")]:
            for step in idle:
                if rank == 1 and step == "-":
                    moepass.gather_only_step(run)
                else:
                    assert torch.equal(run(tokens()), expected)
    return report.store.ring().statistics.copies


@pytest.mark.parametrize("depth", [1, 3])
def test_a_rank_without_work_joins_by_gathering_only(depth: int) -> None:
    busy, idle = run_ranks(2, _idle_ranks_join, depth)
    assert (busy, idle) == (8 * depth, 4 * depth)


def _takes_no_memory() -> None:
    model = _stack(depth=3)
    store = _offload(model).store
    for _ in range(2):
        if dist.get_rank() == 1:
            before = store._ring, store._eager
            moepass.gather_only_step(model)
            assert (store._ring, store._eager) == before == (None, None)
        else:
            with torch.no_grad():
                model(tokens())


def test_gathering_only_makes_neither_a_ring_nor_a_bank() -> None:
    run_ranks(2, _takes_no_memory)


def _idle_ranks_of_adopted_models_join() -> None:
    rank = dist.get_rank()
    other = dataclasses.replace(SMALL, seed=1, experts=6)
    with torch.no_grad():
        for config in (SMALL, other):
            compiled, full, hidden = _adopted(config), build_stack(config), _hidden(config, 8, rank)
            with pytest.raises(moepass.InputError, match="run it once, compiled with backend='asyncep'"):
                moepass.gather_only_step(compiled)  # type: ignore[arg-type]
            assert torch.equal(compiled(hidden), full(hidden))
            for step in range(4):
                if rank == step % 2:
                    moepass.gather_only_step(compiled)  # type: ignore[arg-type]
                else:
                    assert torch.equal(compiled(hidden), full(hidden))


@pytest.mark.slow
def test_idle_ranks_of_adopted_models_join_the_gathers_of_that_model_alone() -> None:
    run_ranks(2, _idle_ranks_of_adopted_models_join)


def _reads_outside_blocks_are_gathered() -> None:
    with torch.no_grad():
        model = _stack(depth=2)
        expected = model(tokens())
        _offload(model)
        compiled = _compiled(model, disable=["rewrite", "plan", "schedule", "verify"])
        for step in range(4):
            if dist.get_rank() == 1 and step > 1:
                moepass.gather_only_step(compiled)  # type: ignore[arg-type]
            else:
                assert torch.equal(compiled(tokens()), expected)


def test_reads_outside_recognised_blocks_are_gathered_tensor_by_tensor() -> None:
    run_ranks(2, _reads_outside_blocks_are_gathered)


def _nothing_to_join() -> None:
    model = _stack(depth=1)
    with pytest.raises(moepass.InputError, match="Stack has no expert banks: call offload_experts or load_pretrained"):
        moepass.gather_only_step(model)
    moepass.offload_experts(model, home="peer", timeout_s=50)
    if dist.get_rank() == 0:
        moepass.gather_only_step(model)


def test_with_pull_there_is_nothing_to_join() -> None:
    run_ranks(2, _nothing_to_join)


def _order_differs() -> list[str]:
    rank = dist.get_rank()
    model = _stack(depth=2)
    _offload(model)
    errors = []
    with torch.no_grad():
        for attempt in (lambda: model.blocks[rank].up, lambda: model(tokens()), lambda: _compiled(model)(tokens())):
            with pytest.raises(PeerError) as caught:
                attempt()
            errors.append(str(caught.value))
    return errors


def test_another_order_is_one_error_on_all_ranks_and_never_other_weights() -> None:
    first, second = run_ranks(2, _order_differs)
    assert first == second
    assert len(set(first)) == 1
    assert first[0].startswith(
        "ranks gather different things at the same time: bank blocks.0 on rank 0, bank blocks.1 on rank 1. "
    )


def _a_rank_runs_fewer_steps() -> str:
    model = _stack(depth=2)
    _offload(model, timeout_s=1.0)
    with torch.no_grad():
        model(tokens())
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(1.8)  # longer than the others wait
        started = time.perf_counter()
        with pytest.raises(PeerError) as caught:
            model(tokens())
        assert time.perf_counter() - started < 2.0
    return str(caught.value)


def test_a_rank_that_runs_fewer_steps_is_named_within_the_timeout() -> None:
    first, second = run_ranks(2, _a_rank_runs_fewer_steps)
    assert first == second
    assert first.startswith("rank 1 did not come to gather bank blocks.0 within 1 s. With transport 'collective' all")
    assert "call moepass.gather_only_step(model) on a rank that has no work" in first


def _one_drops_its_model() -> str:
    model = _stack()
    threads = threading.active_count()
    _offload(model)
    with torch.no_grad():
        compiled = _compiled(model)
        compiled(tokens())
        dist.barrier()
        if dist.get_rank() == 0:
            started = time.perf_counter()
            with pytest.raises(PeerError) as caught:
                _run_on_and_on(compiled)
            assert time.perf_counter() - started < 10
            return str(caught.value)
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:  # the copy thread ends soon
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ""


def test_a_model_that_is_dropped_leaves_nothing_and_is_missed() -> None:
    text, _ = run_ranks(2, _one_drops_its_model)
    assert text.startswith("rank 1 is gone, or its model is: the connection to it (transport 'collective') was lost")


def _run_on_and_on(run: Callable[..., Any]) -> None:
    """Where another rank fails at the end of a step, this one still finishes it."""
    while True:
        run(tokens())


class _Broken(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        raise ZeroDivisionError("by hand")


def _one_fails_in_the_middle(number: int) -> list[str]:
    """Errors of three calls, and that they come at once; rank 1 fails in segment `number` of its second run."""
    rank = dist.get_rank()
    model = _stack(depth=4)
    with torch.no_grad():
        expected = model(tokens())
        _offload(model)
        with moepass.record_compilations() as compilations:
            compiled = _compiled(model)
            assert torch.equal(compiled(tokens()), expected)
        modules = compilations[0].executor.graph_module.modules()
        located: Any = [module for module in modules if type(module).__name__ == "Located"][number]
        dist.barrier()
        started = time.perf_counter()
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
        assert time.perf_counter() - started < 10
    return errors


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 2, -1])
def test_an_exception_on_one_rank_is_one_error_on_the_others_for_good(number: int) -> None:
    outcomes = run_ranks(3, _one_fails_in_the_middle, number)
    (text,) = {error for errors in outcomes for error in errors}
    assert text.startswith("rank 1 left a run in the middle, so that no rank can gather: SegmentError: in segment_")


def _one_fails_half_way() -> None:
    model = _stack()
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(peer_home, "write_parts", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                _offload(model)
        return
    with pytest.raises(PeerError, match=r"^rank 1 failed: MemoryError: no room$"):
        _offload(model)
    with torch.no_grad(), pytest.raises(PeerError, match=r"blocks\.0 is not complete, because offload_experts failed"):
        _compiled(model)(tokens())


def test_a_rank_that_fails_while_it_packs_is_one_error_on_the_others() -> None:
    run_ranks(2, _one_fails_half_way)


def _transports_differ() -> str:
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(_stack(), home="peer", transport=["pull", "collective"][dist.get_rank()], timeout_s=50)
    return str(caught.value)


def test_ranks_with_different_transports_are_told() -> None:
    assert set(run_ranks(2, _transports_differ)) == {
        "ranks disagree on the transport: pull on rank 0, collective on rank 1; give every rank the same model and "
        "checkpoint, in one group on one machine"
    }


def _forked_child() -> str:
    model = _stack(depth=1)
    _offload(model)
    with torch.no_grad():
        model(tokens())
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                model(tokens())
                text = "nothing was wrong"
            except PeerError as error:
                text = str(error)
            os.write(write, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(read, 10_000).decode()
        model(tokens())  # the parent goes on
    return told


def test_a_forked_child_is_told_that_it_cannot_gather() -> None:
    for rank, text in enumerate(run_ranks(2, _forked_child)):
        assert text.startswith(f"this process was forked from rank {rank} and has no part in its gathers")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"home": "peer", "transport": "push"}, r"transport is 'push'; it must be one of collective, pull"),
        ({"home": "peer", "transport": 3}, r"transport is 3; it must be one of collective, pull"),
        ({"transport": "pull"}, r"transport is 'pull', but home is 'host'.* a transport goes with home='peer'"),
        ({"transport": "collective"}, r"transport is 'collective', but home is 'host'"),
    ],
)
def test_wrong_transports_name_themselves(arguments: dict[str, Any], message: str) -> None:
    model = _stack()
    before = model(tokens())
    for call in (
        lambda: moepass.offload_experts(model, **arguments), lambda: moepass.load_pretrained("nowhere", **arguments),
    ):  # fmt: skip
        with pytest.raises(moepass.OptionError, match=message):
            call()
    assert torch.equal(model(tokens()), before)


def test_the_option_of_the_backend_is_checked() -> None:
    assert parse_options({"transport": "collective"}).adoption().transport == "collective"
    assert parse_options({}).adoption().transport == "pull"
    with pytest.raises(moepass.OptionError, match=r"option transport is 'host'; it must be one of collective, pull"):
        parse_options({"transport": "host"})
    with pytest.raises(
        moepass.OptionError, match=r"option transport is 'pull', but the experts of this model were off"
    ):
        parse_options({"transport": "pull"}).refuse_adoption()


def _serve(connection: Connection, store: str, rank: int, size: int, mode: str) -> None:
    """A rank that runs a step whenever it is told to, and says what came of it."""
    join_group(store, rank, size)
    step: Callable[..., Any]
    if mode == "adopted":
        inputs, expected = _hidden(SMALL, 8, rank), build_stack(SMALL)(_hidden(SMALL, 8, rank))
        step = _adopted(SMALL)
    else:
        model = _stack()
        inputs, expected = tokens(), model(tokens())
        _offload(model)
        step = _compiled(model) if mode == "compiled" else model
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
        started = time.perf_counter()
        texts = set()
        for _ in range(2):
            for worker in survivors:
                worker.tell("run")
            texts |= {worker.hear() for worker in survivors}
        assert time.perf_counter() - started < 5
        (text,) = texts
        assert text.startswith(
            "rank 1 is gone, or its model is: the connection to it (transport 'collective') was lost"
        )
        for worker in survivors:
            worker.tell("end")
            worker.process.join(20)
            assert worker.process.exitcode == 0


def _run_until_an_error(connection: Connection, store: str, rank: int, size: int, mode: str) -> None:
    join_group(store, rank, size)
    model = _stack()
    expected = model(tokens())
    connection.send("joined")
    try:
        _offload(model, timeout_s=5)
        step = _compiled(model) if mode == "compiled" else model
        while torch.equal(step(tokens()), expected):
            pass
        connection.send("wrong")
    except PeerError as error:
        connection.send(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_a_rank_may_be_killed_at_any_moment(attempt: int, tmp_path: Path) -> None:
    store, mode = str(tmp_path / "store"), ["eager", "compiled"][attempt % 2]
    moment = random.Random(attempt).uniform(0.0, 0.3 if mode == "eager" else 3.0)
    with (
        Worker(_run_until_an_error, store, 0, 3, mode) as first,
        Worker(_run_until_an_error, store, 1, 3, mode) as killed,
        Worker(_run_until_an_error, store, 2, 3, mode) as last,
    ):
        for worker in (first, killed, last):
            assert worker.hear() == "joined"
        time.sleep(moment)  # not to wait for anything: the moment is what is tested
        killed.kill()
        started = time.perf_counter()
        for worker in (first, last):
            text = worker.hear()
            assert "rank 1" in text or "could not connect to all" in text
            worker.process.join(20)
            assert worker.process.exitcode == 0
        assert time.perf_counter() - started < 15
