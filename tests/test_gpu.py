"""What runs on a GPU alone: the copy stream and its events, and memory that GPUs of several ranks share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_helper import Stack, tokens

import moepass

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _stack(depth: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=depth, bias=True).cuda()


def _check_exact(model: Stack, expected: torch.Tensor, slots: int) -> None:
    inputs = tokens().cuda()
    assert torch.equal(model(inputs), expected)
    compiled: Callable[..., Any] = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    for _ in range(4):
        assert torch.equal(compiled(inputs), expected), slots


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_experts_stream_from_pinned_memory(no_grad: None, slots: int) -> None:
    model = _stack()
    expected = model(tokens().cuda())
    report = moepass.offload_experts(model, slots=slots)
    assert report.store.device.type == "cuda"
    assert all(bank.shard.is_pinned() for bank in report.store.banks)
    _check_exact(model, expected, slots)


def test_inductor_streams_too(no_grad: None) -> None:
    model = _stack()
    inputs = tokens().cuda()
    expected = model(inputs)
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep")
    for _ in range(3):
        torch.testing.assert_close(compiled(inputs), expected, rtol=1e-4, atol=1e-5)


def _rank(rank: int, store: str, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = _stack()
    with torch.no_grad():
        expected = model(tokens().cuda())
        report = moepass.offload_experts(model, home="peer", timeout_s=50)
        assert all(bank.shard.is_cuda for bank in report.store.banks)
        _check_exact(model, expected, 2)
        statistics = report.store.ring().statistics
        assert 0 < statistics.link_bytes < statistics.copied_bytes
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_copy_from_each_others_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of torch, for tests: two ranks share the one GPU that there is.
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (str(Path(folder, "store")), 2), nprocs=2)
