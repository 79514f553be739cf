"""Slots without this rank's experts, on real ranks: own experts are read from the shard, with equal results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.compilations import Compilation
from moepass.passes.ir.shards import expert_range, slot_layout
from moepass.runtime.transfer.ring import Ring
from tests.helpers.graphs.backend_helper import EXPERTS, Stack, tokens
from tests.helpers.models.moe_stack import build_stack
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows
from tests.helpers.processes.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

DEPTH = 3


def _compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="asyncep", options={"lower": "inductor", "debug": True, **options})


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack("grouped_mm", depth=DEPTH, bias=True)


def _ring(compilation: Compilation) -> Ring:
    ring = compilation.executor.ring
    assert ring is not None
    return ring


def _matrices_in_parts(compilation: Compilation) -> bool:
    return all(
        {bank.tensors[index].shape for index in bank.in_parts} == {t.shape for t in bank.tensors if len(t.shape) == 3}
        for bank in compilation.plan.banks
    )


def _parts_equal_whole_banks(transport: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        expected = _stack()(tokens())
        model = _stack()
        report = moepass.offload_experts(model, home=moepass.Peer(transport=transport, timeout_s=50))
        with moepass.record_compilations() as compilations:
            in_parts = _compiled(model)
            outputs = [in_parts(tokens()) for _ in range(3)]
        (compilation,) = compilations
        assert _matrices_in_parts(compilation)
        plan, ring = compilation.plan, _ring(compilation)
        fewest = EXPERTS // ranks
        for bank in plan.banks:
            slot_bytes = bank.format.slot_bytes
            matrices = sum(bank.tensors[position].nbytes for position in bank.in_parts)
            assert slot_layout(bank).nbytes == slot_bytes - matrices * fewest // EXPERTS
        assert ring.device_bytes == plan.slots * plan.slot_bytes
        assert plan.slot_bytes < report.store.slot_bytes or fewest == 0
        # Slots contain complete tables, so this rank's rows of them are copied too.
        experts_here = len(expert_range(plan.banks[0], rank))
        tables = sum(t.nbytes * experts_here // EXPERTS for t in plan.banks[0].tensors if len(t.shape) < 3)
        assert ring.statistics.copied_bytes - ring.statistics.link_bytes == tables * ring.statistics.copies

        with moepass.record_compilations() as compilations:
            as_whole = _compiled(model, disable=["bank_parts"])
            outputs += [as_whole(tokens()) for _ in range(2)]
        assert not any(bank.in_parts for bank in compilations[0].plan.banks)
        assert (
            ring.device_bytes == plan.slots * report.store.slot_bytes
        )  # the ring grew for the graph that needs larger slots
        outputs += [in_parts(tokens()) for _ in range(2)]  # slots are larger than these banks need
        # Debug mode filled every released slot with NaN, but no shard.
        outputs.append(model(tokens()))
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=0.0, atol=1e-5)
    for output in outputs[:-1]:
        assert torch.equal(output, outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (1, "pull"),
        (3, "pull"),  # 4 experts on 3 ranks
        (2, "collective"),
        (5, "collective"),  # a rank without experts
    ],
)
def test_slots_without_own_experts_give_the_same_results(ranks: int, transport: str) -> None:
    run_ranks(ranks, _parts_equal_whole_banks, transport, timeout=200)


def _lowerings_share_a_ring(first: str, second: str) -> None:
    with torch.no_grad():
        model = tiny_model("qwen3_moe", num_hidden_layers=2)
        inputs = tiny_inputs(model)
        expected = model(**inputs).logits
        moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
        with moepass.record_compilations() as compilations:
            runs = [_compiled(model, lower=first)]
            runs[0](**inputs)
            runs.append(_compiled(model, lower=second))
            for _ in range(2):
                for run in runs:
                    torch.testing.assert_close(run(**inputs).logits, expected, rtol=0.0, atol=1e-5)
    in_parts = {c.executor.plan.slot_bytes: _matrices_in_parts(c) for c in compilations}
    assert sorted(in_parts.values()) == [False, True]
    (ring,) = {_ring(compilation) for compilation in compilations}
    assert ring.device_bytes == 2 * max(in_parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("inductor", "eager"), pytest.param("eager", "inductor", marks=pytest.mark.slow)]
)
def test_graphs_with_parts_and_with_whole_banks_share_a_ring(first: str, second: str) -> None:
    run_ranks(2, _lowerings_share_a_ring, first, second, timeout=200)


def _adopted_banks_come_in_parts(transport: str) -> None:
    hidden = hidden_rows(SMALL, 24, dist.get_rank())
    with torch.no_grad(), moepass.record_compilations() as compilations:
        expected = build_stack(SMALL)(hidden)
        compiled = compile_whole(build_stack(SMALL, "all_to_all"), lower="inductor", transport=transport)
        for _ in range(3):
            torch.testing.assert_close(compiled(hidden), expected, rtol=1e-5, atol=1e-5)
    (compilation,) = compilations
    assert _matrices_in_parts(compilation)
    plan, statistics = compilation.plan, _ring(compilation).statistics
    assert plan.slot_bytes == max(bank.format.slot_bytes for bank in plan.banks) // dist.get_world_size()
    assert _ring(compilation).device_bytes == plan.slots * plan.slot_bytes
    assert statistics.copied_bytes == statistics.link_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "collective"])
def test_experts_of_expert_parallelism_come_in_parts(transport: str) -> None:
    run_ranks(2, _adopted_banks_come_in_parts, transport, timeout=200)
