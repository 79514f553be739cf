"""Part `ranks`: two ranks share one GPU and copy experts from each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

import moepass
from benchmarks.acceptance.results import PartChecks
from benchmarks.on_gpu.target import Target, WrongResultError
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.processes.ranks import run_ranks

RANKS = 2
HOMES = {"peer": moepass.Peer, "hybrid": moepass.Hybrid}
# Banks of 3 MB.
WIDTH = 1 << 11
RUNS = 3
TIMEOUT_S = 25.0

# Returns the outputs of a rank for a home and a kind of device.
Answer = Callable[[str, str], list[torch.Tensor]]


def ranks(target: Target, checks: PartChecks, folder: Path) -> None:
    """Compare each rank's outputs with those of the uncompiled model, for both homes that are spread over ranks."""
    # Of torch, for tests: two ranks share one GPU.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for home in HOMES:
        checks.run(f"home {home}", lambda home=home: check_ranks(home, target.device.type))


def stack_of(device: torch.device) -> Stack:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Stack("dense_bmm", depth=3, bias=True, width=WIDTH).to(device)


@torch.no_grad()
def streamed_outputs(home: str, kind: str) -> list[torch.Tensor]:
    """Return the outputs of several runs with experts streamed from both ranks. Called on each rank."""
    device = torch.device(kind, 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    model, inputs = stack_of(device), tokens().to(device)
    report = moepass.offload_experts(model, home=HOMES[home](timeout_s=TIMEOUT_S))
    compiled = torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})
    outputs = [compiled(inputs).cpu() for _ in range(RUNS)]
    torch.distributed.barrier()  # keeps the memory of both ranks until neither reads it
    assert report.store.ring().statistics.copied_bytes > 0
    return outputs


@torch.no_grad()
def check_ranks(home: str, kind: str, answer: Answer = streamed_outputs) -> str:
    """Check that `answer` returns the bits of the uncompiled model on every rank in every run."""
    device = torch.device(kind, 0)
    expected = stack_of(device)(tokens().to(device)).cpu()
    outputs = run_ranks(RANKS, answer, home, kind, timeout=TIMEOUT_S)
    for rank, of_rank in enumerate(outputs):
        for run, output in enumerate(of_rank):
            if not torch.equal(output, expected):
                off = float((output - expected).abs().max())
                raise WrongResultError(f"rank {rank} differs from the uncompiled model by {off:.1e} in run {run}")
    return f"{RANKS} ranks on one device, {RUNS} runs each, equal to the bit"
