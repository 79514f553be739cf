"""Home `hybrid` on real ranks: exact with every state of the buffers, and without waiting for idle ranks."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.models.checkpoint.load_model import load_model
from moepass.runtime.banks.banks import BankStore
from moepass.runtime.homes.hybrid import staged_pull, staging_board
from moepass.runtime.homes.hybrid.staging_order import StagingState
from moepass.runtime.ranks.rendezvous import PeerError
from moepass.runtime.transfer.sources import MemorySource
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in staging_board._ORDERED_MACHINES,
    reason="shared shards need memfd_create, and staging buffers x86-64",
)


def _compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})


def _stack(form: str = "dense_bmm", depth: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(form, depth=depth, bias=True)


def _check_figures(store: BankStore) -> None:
    """Check that all bytes of runs came from staging buffers or shards, without those copied ahead for the next run."""
    statistics = store.ring().statistics
    used = statistics.staged_bytes + statistics.unstaged_bytes
    assert 0 < used <= statistics.copied_bytes


def _model_stays_exact(family: str, overrides: dict[str, Any], buffers: int) -> None:
    model: nn.Module = _stack(family) if family in BLOCKS else tiny_model(family, **overrides)
    inputs = {"x": tokens()} if family in BLOCKS else tiny_inputs(model)  # type: ignore[arg-type]

    def run(model: Callable[..., Any]) -> torch.Tensor:
        output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[no-any-return]

    with torch.no_grad():
        expected = run(model)
        report = moepass.offload_experts(model, home=moepass.Hybrid(staging_buffers=buffers, timeout_s=50))
        assert (report.home, report.transport) == ("hybrid", "pull")
        assert report.staging_bytes == buffers * max(bank.shard.numel() for bank in report.store.banks)
        assert torch.equal(run(model), expected)
        with moepass.record_compilations() as compilations:
            compiled = _compiled(model)
            for _ in range(6):
                assert torch.equal(run(compiled), expected)
    (compilation,) = compilations
    assert not compilation.plan.refusals
    assert {bank.home for bank in compilation.plan.banks} == {"hybrid"}
    assert "lie in shards in host memory, staged on all ranks" in compilation.plan.reason
    _check_figures(report.store)


@pytest.mark.parametrize(
    ("ranks", "family", "overrides", "buffers"),
    [
        pytest.param(1, "dense_bmm", {}, 2, marks=pytest.mark.slow),
        pytest.param(2, "dense_bmm", {}, 1, marks=pytest.mark.slow),
        (3, "grouped_mm", {}, 2),  # 4 experts on 3 ranks
        pytest.param(2, "qwen3_moe", {"num_hidden_layers": 3}, 3, marks=pytest.mark.slow),
        pytest.param(3, "qwen3_moe", {}, 2, marks=pytest.mark.slow),  # 8 experts on 3 ranks
        pytest.param(  # a rank without experts
            3,
            "qwen3_moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2},
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_stay_exact_on_every_rank(ranks: int, family: str, overrides: dict[str, Any], buffers: int) -> None:
    run_ranks(ranks, _model_stays_exact, family, overrides, buffers)


def _one_runs_and_one_is_idle() -> None:
    store = dist.distributed_c10d._get_default_store()
    with torch.no_grad():
        model = _stack(depth=4)
        expected = model(tokens())
        # The link is slower than this machine, so that staged bytes arrive before they are requested.
        banks = moepass.offload_experts(
            model, home=moepass.Hybrid(link="emulate:1e7", host_link="emulate:2e7", timeout_s=50)
        )
        compiled = _compiled(model)
        if dist.get_rank() == 0:
            for _ in range(10):
                assert torch.equal(compiled(tokens()), expected)
            # The bytes also come from the staging buffers of an idle rank.
            statistics = banks.store.ring().statistics
            assert statistics.staged_bytes > statistics.unstaged_bytes
            store.set("ten steps", "done")
            # Its shards stay readable even when the model is gone.
            del model, compiled, banks
            torch._dynamo.reset()
            gc.collect()
            deadline = time.monotonic() + 10
            while "moepass-stager" in [thread.name for thread in threading.enumerate()]:
                assert time.monotonic() < deadline, "the stager's thread does not end with the model"
                time.sleep(0.001)
            store.set("model", "gone")
            store.wait(["the other"], timedelta(seconds=50))
        else:
            store.wait(["ten steps", "model"], timedelta(seconds=50))
            for _ in range(2):
                assert torch.equal(compiled(tokens()), expected)
            assert torch.equal(model(tokens()), expected)
            store.set("the other", "done")


@pytest.mark.slow
def test_an_idle_rank_neither_waits_nor_is_waited_for_and_its_buffers_serve_the_others() -> None:
    run_ranks(2, _one_runs_and_one_is_idle)


def _at_different_layers() -> None:
    """Let ranks drift apart: one of them computes longer between its steps."""
    with torch.no_grad():
        model = _stack(depth=5)
        expected = model(tokens())
        report = moepass.offload_experts(model, home=moepass.Hybrid(staging_buffers=2, timeout_s=50), slots=1)
        compiled = _compiled(model)
        for step in range(30):
            assert torch.equal(compiled(tokens()), expected)
            if step % 3 == dist.get_rank():
                time.sleep(0.003)
    _check_figures(report.store)


@pytest.mark.slow
def test_ranks_that_drift_apart_stay_exact() -> None:
    run_ranks(3, _at_different_layers)


def _all_is_overwritten_while_it_is_copied() -> None:
    """Refill every staging buffer with another bank's bytes during the copy from it."""
    with torch.no_grad():
        model = _stack()
        expected = model(tokens())
        report = moepass.offload_experts(model, home=moepass.Hybrid(timeout_s=50))
        states = staging_board.StagingBoard.state
        generations = itertools.count()

        def never_the_same(board: staging_board.StagingBoard, buffer: int) -> StagingState:
            return dataclasses.replace(states(board, buffer), generation=next(generations))

        class PoisonedSource(MemorySource):
            def copy(self, offset_bytes: int, nbytes: int, address: int) -> None:
                ctypes.memset(address, 0xFF, nbytes)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(staging_board.StagingBoard, "state", never_the_same)
            patched.setattr(staged_pull, "MemorySource", PoisonedSource)
            compiled = _compiled(model)
            for _ in range(3):
                assert torch.equal(compiled(tokens()), expected)
        statistics = report.store.ring().statistics
        assert statistics.staged_bytes == 0 < statistics.unstaged_bytes


@pytest.mark.slow
def test_bytes_overwritten_during_a_copy_are_fetched_again() -> None:
    run_ranks(2, _all_is_overwritten_while_it_is_copied)


def _differs() -> str:
    model = _stack(depth=2)
    before = model(tokens())
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(model, home=moepass.Hybrid(staging_buffers=2 + dist.get_rank(), timeout_s=50))
    assert torch.equal(model(tokens()), before)
    return str(caught.value)


def test_ranks_with_different_numbers_of_stages_get_one_error() -> None:
    (text,) = set(run_ranks(2, _differs))
    assert text.startswith("ranks disagree on the number of staging buffers: 2 on rank 0, 3 on rank 1")


def _states_are_refused() -> None:
    model = _stack(depth=2)
    moepass.offload_experts(model, home=moepass.Hybrid(timeout_s=50))
    with pytest.raises(moepass.InputError, match="staged from shards that must not change: take or load a state_dict"):
        model.state_dict()
    with pytest.raises(moepass.InputError, match="staged from shards that must not change"):
        model.load_state_dict({"blocks.0.up": torch.zeros(1)}, strict=False)


def test_shards_cannot_be_loaded_into_because_stages_would_not_see_it() -> None:
    run_ranks(1, _states_are_refused)


def _load(folder: Path) -> tuple[int, tuple[int, int]]:
    progress: list[tuple[int, int]] = []
    home = moepass.Hybrid(timeout_s=50)
    model = moepass.load_pretrained(folder, home=home, progress=lambda *now: progress.append(now))
    reference = load_model(folder)
    moepass.offload_experts(reference)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = reference(**inputs).logits
        assert torch.equal(model(**inputs).logits, expected)
        compiled = _compiled(model)
        for _ in range(2):
            assert torch.equal(compiled(**inputs).logits, expected)
    report = moepass.offload_report(model)
    assert report.home == "hybrid"
    assert report.staging_bytes == 2 * max(bank.shard.numel() for bank in report.store.banks)
    return report.home_bytes, progress[-1]


@pytest.mark.slow
def test_a_checkpoint_is_loaded_rank_by_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _load, save_tiny_checkpoint(tmp_path / "whole"))
    assert all(home_bytes < read == in_all for home_bytes, (read, in_all) in outcomes)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, moepass.InputError, r"home='hybrid' spread experts over the ranks of torch\.distributed, which is not"),
        ({"device": "meta"}, moepass.InputError, r"device is meta; home='hybrid' works on cpu and cuda only"),
    ],
)
def test_wrong_arguments_leave_the_model_alone(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = _stack()
    before = model(tokens())
    with pytest.raises(kind, match=message):
        moepass.offload_experts(model, **{"home": "hybrid", **arguments})
    assert torch.equal(model(tokens()), before)


def _on_another_machine() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(platform, "machine", lambda: "aarch64")
        with pytest.raises(moepass.InputError, match=r"this machine is 'aarch64'; home='hybrid' works on x86-64 only"):
            moepass.offload_experts(_stack(), home=moepass.Hybrid(timeout_s=50))


def test_a_machine_that_reorders_memory_is_refused() -> None:
    run_ranks(1, _on_another_machine)
