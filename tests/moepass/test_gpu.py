"""Tests that need a GPU: the copy stream and its events, and memory that the GPUs of several ranks share."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import moepass
from moepass.passes.ir.timeline import COMPUTE, COPY
from moepass.runtime.homes.adopted_banks import adopted_banks
from moepass.runtime.ranks.replicas import checksum
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.processes.adopted_stacks import ring_of, shard_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Banks of 50 MB: a copy takes as long as many kernels, so that what does not wait for it is seen.
WIDTH = 1 << 15
# About 10 ms, before which nothing that was issued can be over.
SLEEP_CYCLES = 20_000_000


def _stack(device: torch.device) -> Stack:
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=4, bias=True, width=WIDTH).to(device)


def _check_exact(model: Stack, inputs: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(model(inputs), expected)
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    for _ in range(4):
        torch.cuda._sleep(SLEEP_CYCLES)
        assert torch.equal(compiled(inputs), expected)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_experts_stream_from_pinned_memory(no_grad: None, slots: int) -> None:
    device = torch.device("cuda", 0)
    model, inputs = _stack(device), tokens().to(device)
    expected = model(inputs)
    report = moepass.offload_experts(model, slots=slots)
    assert report.store.device == device
    assert all(bank.shard.is_pinned() for bank in report.store.banks)
    _check_exact(model, inputs, expected)


@pytest.mark.parametrize("slots", [1, 2])
def test_experts_stream_from_files(no_grad: None, tmp_path: Path, slots: int) -> None:
    device = torch.device("cuda", 0)
    model, inputs = _stack(device), tokens().to(device)
    expected = model(inputs)
    moepass.offload_experts(model, home=moepass.Disk(folder=tmp_path), slots=slots)
    _check_exact(model, inputs, expected)


def test_inductor_streams_too(no_grad: None) -> None:
    device = torch.device("cuda", 0)
    model, inputs = _stack(device), tokens().to(device)
    expected = model(inputs)
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep")
    for _ in range(3):
        torch.testing.assert_close(compiled(inputs), expected, rtol=1e-4, atol=1e-5)


def test_a_timeline_shows_copies_beside_segments_and_what_is_exposed(no_grad: None) -> None:
    device = torch.device("cuda", 0)
    model, inputs = _stack(device), tokens().to(device)
    store = moepass.offload_experts(model).store
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
    compiled(inputs)
    # Waits count once they are over.
    torch.cuda.synchronize(device)
    before = store.ring().statistics.waited_seconds
    with moepass.record_timeline() as recording:
        compiled(inputs)
    timeline = recording.timeline
    assert timeline.source == "measured"
    assert len([event for event in timeline.on(COMPUTE) if event.op == "wait"]) == 4
    assert {event.layer for event in timeline.on(COPY)} == {bank.spec.name for bank in store.banks}
    assert all(event.seconds > 0 for event in timeline.on(COPY))
    waited = store.ring().statistics.waited_seconds - before
    # By the same events, and on the timeline as the difference of two moments of half a microsecond's precision.
    assert waited == pytest.approx(timeline.seconds("wait"), rel=1e-3, abs=1e-5)


def _join(rank: int, store: str, ranks: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    return device


def _offloads(rank: int, store: str, ranks: int) -> None:
    device = _join(rank, store, ranks)
    model, inputs = _stack(device), tokens().to(device)
    with torch.no_grad():
        expected = model(inputs)
        report = moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        assert all(bank.shard.device == device for bank in report.store.banks)
        _check_exact(model, inputs, expected)
        statistics = report.store.ring().statistics
        assert 0 < statistics.link_bytes < statistics.copied_bytes
    _leave()


def _stages(rank: int, store: str, ranks: int) -> None:
    device = _join(rank, store, ranks)
    model, inputs = _stack(device), tokens().to(device)
    with torch.no_grad():
        expected = model(inputs)
        report = moepass.offload_experts(model, home=moepass.Hybrid(timeout_s=50))
        assert all(bank.shard.is_pinned() for bank in report.store.banks)
        _check_exact(model, inputs, expected)
        statistics = report.store.ring().statistics
        assert statistics.staged_bytes + statistics.unstaged_bytes > 0
    _leave()


def _leave() -> None:
    # By gloo: NCCL takes no two ranks on one GPU.
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


# Wide enough for grouped GEMMs, which require bf16 on a GPU.
PARALLEL = StackConfig(layers=4, hidden=512, width=512, experts=16, top_k=4, dtype=torch.bfloat16)


def _parallel(rank: int, store: str, ranks: int) -> None:
    device = _join(rank, store, ranks)
    torch._dynamo.config.capture_scalar_outputs = True
    with torch.no_grad(), moepass.record_compilations() as compilations:
        full, model = build_stack(PARALLEL).to(device), build_stack(PARALLEL, "all_to_all").to(device)
        options = {"lower": "eager", "debug": True}
        compiled = torch.compile(model, backend="asyncep", options=options, fullgraph=True)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            hidden = torch.randn(512, PARALLEL.hidden, generator=generator).to(device, PARALLEL.dtype)
            torch.testing.assert_close(compiled(hidden), full(hidden), rtol=2e-2, atol=2e-2)
    (compilation,) = compilations
    assert not compilation.plan.refusals, compilation.plan.refusals
    assert [block.parallel for block in compilation.plan.blocks] == ["all_to_all"] * PARALLEL.layers
    home = adopted_banks(c10d._get_default_group(), device).home
    assert shard_bytes(home) == sum(parameter.nbytes for layer in model.moe for parameter in layer.experts.parameters())
    assert sum(bank.held_twice_bytes for bank in home.banks.values()) == 0
    ring = ring_of(home)
    assert 0 < ring.statistics.link_bytes < ring.statistics.copied_bytes
    _leave()


@pytest.mark.parametrize("run", [_offloads, _stages, _parallel])
def test_ranks_copy_from_each_others_gpu_memory(monkeypatch: pytest.MonkeyPatch, run: Callable[..., None]) -> None:
    if torch.cuda.device_count() < 2:
        # Of torch, for tests: two ranks share the one GPU that there is.
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (str(Path(folder, "store")), 2), nprocs=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_checksums_are_those_of_the_same_numbers_on_a_processor(dtype: torch.dtype) -> None:
    octets = torch.randint(0, 2, (3 * 2**20 + 8,), dtype=torch.uint8)
    values = octets.view(dtype)
    assert checksum(values.cuda()) == checksum(values)
    assert checksum(values.cuda()[1:]) == checksum(values[1:])
