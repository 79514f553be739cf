"""Transport `collective` on real ranks: exact, in step with each other, also with ranks that have no work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moepass
from moepass.models.checkpoint.load_model import load_model
from moepass.options import parse_options
from moepass.runtime.homes import peers
from moepass.runtime.system.processes import ProcessError
from moepass.runtime.system.shared_memory import SharedMemoryError
from tests.helpers.graphs.backend_helper import Stack, tokens
from tests.helpers.graphs.tiny_checkpoint import save_tiny_checkpoint
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.models.tiny import tiny_inputs, tiny_model
from tests.helpers.processes.collective_helper import (
    SMALL,
    adopted_model,
    bias_stack,
    compiled_model,
    hidden_states,
    offload_collective,
)
from tests.helpers.processes.ranks import run_ranks


def _no_shared_memory(*_: object) -> Any:
    raise SharedMemoryError("this machine has none")


def _no_watch(*_: object) -> Any:
    raise ProcessError("this machine cannot tell processes apart")


def _offloaded_model_stays_exact(family: str, overrides: dict[str, Any]) -> None:
    model: nn.Module = bias_stack(family) if family == "grouped_mm" else tiny_model(family, **overrides)
    inputs = {"x": tokens()} if isinstance(model, Stack) else tiny_inputs(model)  # type: ignore[arg-type]

    def run(model: Callable[..., Any]) -> torch.Tensor:
        output = model(**inputs)
        return output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[no-any-return]

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        # Ranks on several machines cannot use these.
        patched.setattr(peers, "create_segment", _no_shared_memory)
        patched.setattr(peers, "this_process", _no_watch)
        expected = run(model)
        report = offload_collective(model)
        assert (report.home, report.transport) == ("peer", "collective")
        for _ in range(2):
            assert torch.equal(run(model), expected)
        with moepass.record_compilations() as compilations:
            compiled = compiled_model(model)
            for _ in range(3):
                assert torch.equal(run(compiled), expected)
    assert len(compilations) == 1
    shard_bytes = complete = 0
    for bank in report.store.banks:
        bounds = bank.spec.expert_bounds
        shard_bytes += sum(t.nbytes // t.shape[0] * (bounds[rank + 1] - bounds[rank]) for t in bank.spec.tensors)
        complete += sum(tensor.nbytes for tensor in bank.spec.tensors)
    statistics = report.store.ring().statistics
    assert len(bounds) == ranks + 1
    assert statistics.copies == 3 * len(report.layers)
    assert statistics.copied_bytes == 3 * complete
    assert statistics.link_bytes == 3 * (complete - shard_bytes)


@pytest.mark.parametrize(
    ("ranks", "family", "overrides"),
    [
        pytest.param(1, "grouped_mm", {}, marks=pytest.mark.slow),
        pytest.param(2, "qwen3_moe", {"num_hidden_layers": 2}, marks=pytest.mark.slow),
        (3, "grouped_mm", {}),  # 4 experts on 3 ranks
        pytest.param(  # a rank without experts
            3,
            "qwen3_moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_offloaded_models_stay_exact_without_memory_in_common(
    ranks: int, family: str, overrides: dict[str, Any]
) -> None:
    run_ranks(ranks, _offloaded_model_stays_exact, family, overrides)


def _adopted_model_stays_exact(config: StackConfig, counts: list[list[int]]) -> None:
    """Run `counts[step][rank]` tokens in each step; with a negative number the rank joins without work."""
    rank = dist.get_rank()
    full = build_stack(config)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = adopted_model(config)
        for step, of_ranks in enumerate(counts):
            if of_ranks[rank] < 0:
                moepass.gather_only_step(compiled)  # type: ignore[arg-type]
                continue
            hidden = hidden_states(config, of_ranks[rank], 100 * step + rank)
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
    model = moepass.load_pretrained(folder, home=moepass.Peer(transport="collective", timeout_s=50))
    assert moepass.offload_report(model).transport == "collective"
    inputs = tiny_inputs(model)
    with torch.no_grad():
        reference = load_model(folder)
        moepass.offload_experts(reference)
        assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


def test_checkpoints_load_for_collective_too(tmp_path: Path) -> None:
    run_ranks(2, _load_on_a_rank, save_tiny_checkpoint(tmp_path / "checkpoint"))


def _idle_ranks_join(depth: int) -> int:
    """Run rank 0 in every step and rank 1 in some of them; first in eager mode, then compiled."""
    rank = dist.get_rank()
    with torch.no_grad():
        model = bias_stack(depth=depth)
        expected = model(tokens())
        report = offload_collective(model, slots=1)
        compiled = compiled_model(model)
        for run, idle in [(model, "+-+-"), (compiled, "--++-+"), (model, "+-"), (compiled, "-+")]:
            for step in idle:
                if rank == 1 and step == "-":
                    moepass.gather_only_step(run)
                else:
                    assert torch.equal(run(tokens()), expected)
    return report.store.ring().statistics.copies


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_a_rank_without_work_joins_by_gathering_only(depth: int) -> None:
    busy, idle = run_ranks(2, _idle_ranks_join, depth)
    assert (busy, idle) == (8 * depth, 4 * depth)


def _tie(model: Stack, how: str) -> None:
    blocks = model.blocks
    if how == "one layer":
        blocks[2] = blocks[0]
    elif how == "neighbours":
        blocks[1] = blocks[0]
    else:
        for name, weight in list(blocks[0].named_parameters()):
            setattr(blocks[2], name, weight)


def _idle_ranks_of_tied_models_join(how: str) -> int:
    """Run as `_idle_ranks_join`, with a change from eager mode to compiled code on both ranks at once."""
    rank = dist.get_rank()
    with torch.no_grad():
        model = bias_stack(depth=4)
        _tie(model, how)
        expected = model(tokens())
        report = offload_collective(model)
        compiled = compiled_model(model)
        if rank == 0:
            with pytest.raises(moepass.InputError, match=r"layers share bank blocks\.0, and this rank has run no f"):
                moepass.gather_only_step(model)
        for run, idle in [(model, "+-+-"), (compiled, "+--"), (model, "+-")]:
            for step in idle:
                if rank == 1 and step == "-":
                    moepass.gather_only_step(run)
                else:
                    assert torch.equal(run(tokens()), expected)
    return len(report.layers)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["one layer", pytest.param("neighbours", marks=pytest.mark.slow), "shared weights"])
def test_layers_that_come_twice_are_gathered_twice(how: str) -> None:
    assert run_ranks(2, _idle_ranks_of_tied_models_join, how) == [3, 3]


class _InParts(nn.Module):
    """A stack whose layers are separate graphs."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stack.blocks:
            x = x + block(x, x[:, :4].topk(2, dim=-1).indices).tanh()
            torch._dynamo.graph_break()
        return x


def _an_order_that_is_not_known_ends_nothing() -> None:
    with torch.no_grad():
        model = bias_stack(depth=4)
        _tie(model, "one layer")
        in_parts = _InParts(model)
        expected = in_parts(tokens())
        offload_collective(model, slots=1)
        compiled = compiled_model(in_parts)
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:
                with pytest.raises(
                    moepass.InputError, match=r"share bank blocks\.0, and the last .* compile the model"
                ):
                    moepass.gather_only_step(in_parts)
            assert torch.equal(compiled(tokens()), expected)


def test_an_unknown_order_does_not_end_gathering() -> None:
    run_ranks(2, _an_order_that_is_not_known_ends_nothing)


def _takes_no_memory() -> None:
    model = bias_stack(depth=3)
    store = offload_collective(model).store
    for _ in range(2):
        if dist.get_rank() == 1:
            before = store.current_ring, store._eager
            moepass.gather_only_step(model)
            assert (store.current_ring, store._eager) == before == (None, None)
        else:
            with torch.no_grad():
                model(tokens())


def test_gathering_only_makes_neither_a_ring_nor_a_bank() -> None:
    run_ranks(2, _takes_no_memory)


def _idle_ranks_of_adopted_models_join() -> None:
    rank = dist.get_rank()
    second_config = dataclasses.replace(SMALL, seed=1, experts=6)
    with torch.no_grad():
        for config in (SMALL, second_config):
            compiled, full, hidden = adopted_model(config), build_stack(config), hidden_states(config, 8, rank)
            with pytest.raises(moepass.InputError, match="first run once, compiled with backend='asyncep'"):
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
        model = bias_stack(depth=2)
        expected = model(tokens())
        offload_collective(model)
        compiled = compiled_model(model, disable=["rewrite", "plan", "schedule", "verify"])
        for step in range(4):
            if dist.get_rank() == 1 and step > 1:
                moepass.gather_only_step(compiled)  # type: ignore[arg-type]
            else:
                assert torch.equal(compiled(tokens()), expected)


def test_reads_outside_recognised_blocks_are_gathered_tensor_by_tensor() -> None:
    run_ranks(2, _reads_outside_blocks_are_gathered)


def _nothing_to_join() -> None:
    model = bias_stack(depth=1)
    with pytest.raises(moepass.InputError, match="Stack has no expert banks: call offload_experts or load_pretrained"):
        moepass.gather_only_step(model)
    moepass.offload_experts(model, home=moepass.Peer(timeout_s=50))
    if dist.get_rank() == 0:
        moepass.gather_only_step(model)


def test_with_pull_there_is_nothing_to_join() -> None:
    run_ranks(2, _nothing_to_join)


def test_the_option_of_the_backend_is_checked() -> None:
    assert parse_options({"transport": "collective"}).adoption().transport == "collective"
    assert parse_options({}).adoption().transport == "pull"
    with pytest.raises(moepass.OptionError, match=r"transport is 'host'; it must be one of collective, pull"):
        parse_options({"transport": "host"})
    with pytest.raises(
        moepass.OptionError, match=r"option transport is 'pull', but the experts of this model were off"
    ):
        parse_options({"transport": "pull"}).refuse_adoption()
