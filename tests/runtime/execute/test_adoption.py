"""Compiled models with expert parallelism: their AllToAlls are removed, and results on real ranks are exact."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moepass
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.graphs.error_fields import refused
from tests.helpers.models.moe_stack import MoEStack, build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows, stays_exact
from tests.helpers.processes.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

OTHER = dataclasses.replace(SMALL, seed=1)
CASES = {
    "even": (2, SMALL, [[16, 16], [16, 16], [7, 20], [32, 5]]),
    "even, one layer": (2, dataclasses.replace(SMALL, layers=1), [[16, 16], [7, 20], [32, 5]]),
    "uneven bf16": (3, dataclasses.replace(SMALL, experts=7, dtype=torch.bfloat16), [[16, 9, 4], [5, 6, 32]]),
    "top-1, one rank without tokens": (2, dataclasses.replace(SMALL, top_k=1), [[16, 0], [0, 8], [12, 8]]),
    "top-8, all to few": (2, dataclasses.replace(SMALL, experts=9, top_k=8, skew=20.0), [[16, 9], [4, 30]]),
    "four ranks, all to one": (4, dataclasses.replace(SMALL, experts=6, top_k=1, skew=50.0), [[8, 9, 0, 32]]),
}


# Every form is fast once.
RUNS = [
    ("even", "all_to_all"),
    ("even, one layer", "all_gather"),
    ("even, one layer", "all_reduce"),
    pytest.param("top-1, one rank without tokens", "all_reduce", marks=pytest.mark.slow),
    pytest.param("uneven bf16", "all_gather", marks=pytest.mark.slow),
    pytest.param("top-8, all to few", "all_to_all", marks=pytest.mark.slow),
    pytest.param("four ranks, all to one", "all_to_all", marks=pytest.mark.slow),
    pytest.param("four ranks, all to one", "all_gather", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("case", "form"), RUNS)
def test_ranks_stay_exact_without_a_single_exchange(case: str, form: str) -> None:
    ranks, config, tokens = CASES[case]
    if form == "all_reduce":
        tokens = [[counts[0]] * ranks for counts in tokens]
    # The even cases are compiled once, for any number of tokens; the others for the first number, then for any.
    run_ranks(ranks, stays_exact, form, config, tokens, True if case.startswith("even") else None)


def _inductor_is_close(form: str) -> float:
    hidden = hidden_rows(SMALL, 24, 0 if form == "all_reduce" else dist.get_rank())
    with torch.no_grad():
        expected = build_stack(SMALL)(hidden)
        difference = compile_whole(build_stack(SMALL, form), lower="inductor")(hidden) - expected
    return float(difference.abs().max() / expected.abs().max())


# The other forms are compiled with Inductor in test_dispatch_ranks.
@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_reduce"])
def test_with_inductor_ranks_stay_close(form: str) -> None:
    assert max(run_ranks(2, _inductor_is_close, form, timeout=200)) < 1e-5


def _one_runs_alone() -> int:
    config = dataclasses.replace(SMALL, layers=3)
    full = build_stack(config)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(config, "all_to_all"))
        compiled(hidden_rows(config, 16, 1))
        dist.barrier()
        if dist.get_rank() == 0:
            for step in range(10):
                hidden = hidden_rows(config, 16, step)
                assert torch.equal(compiled(hidden), full(hidden))
        dist.barrier()
    ring = compilations[0].executor.ring
    assert ring is not None
    return ring.statistics.copies


@pytest.mark.slow
def test_a_rank_runs_ten_steps_while_another_runs_none() -> None:
    busy, idle = run_ranks(2, _one_runs_alone)
    assert busy >= 30
    assert idle <= 5


def _shapes_and_models_share_one_ring() -> None:
    full = build_stack(SMALL)
    six_experts = dataclasses.replace(SMALL, seed=1, experts=6)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        static = torch.compile(
            build_stack(SMALL, "all_to_all"), backend="asyncep", dynamic=False, options={"lower": "eager"}
        )
        torch._dynamo.config.capture_scalar_outputs = True
        for tokens in (8, 12, 8):
            hidden = hidden_rows(SMALL, tokens, tokens)
            assert torch.equal(static(hidden), full(hidden))
        second = torch.compile(build_stack(six_experts, "all_gather"), backend="asyncep", options={"lower": "eager"})
        hidden = hidden_rows(six_experts, 8, 3)
        assert torch.equal(second(hidden), build_stack(six_experts)(hidden))
        assert torch.equal(static(hidden_rows(SMALL, 8, 8)), full(hidden_rows(SMALL, 8, 8)))
    rings = {id(compilation.executor.ring) for compilation in compilations}
    assert len(compilations) == 3
    assert len(rings) == 1
    ring = compilations[0].executor.ring
    assert ring is not None
    assert ring.device_bytes == 2 * max(bank.format.slot_bytes for c in compilations for bank in c.plan.banks)


@pytest.mark.slow
def test_shapes_and_models_of_one_group_share_one_ring() -> None:
    run_ranks(2, _shapes_and_models_share_one_ring)


def _models_one_after_the_other() -> None:
    """A new model may get the memory of a deleted one, but must not get its experts."""
    hidden = hidden_rows(SMALL, 8, 0)
    for seed in range(4):
        config = dataclasses.replace(SMALL, seed=seed)
        torch._dynamo.reset()
        with torch.no_grad():
            model = build_stack(config, "all_to_all")
            assert torch.equal(compile_whole(model)(hidden), build_stack(config)(hidden)), f"seed {seed}"
        del model
        gc.collect()


@pytest.mark.slow
def test_a_model_that_follows_another_has_its_own_experts() -> None:
    run_ranks(2, _models_one_after_the_other)


def _weights_change_too_late() -> None:
    """Every kind of write is noticed. Restored values are no change, and new parameters make the ranks meet again."""
    model = build_stack(SMALL, "all_to_all")
    compiled = compile_whole(model)
    hidden = hidden_rows(SMALL, 8, dist.get_rank())
    with torch.no_grad():
        expected = compiled(hidden)
        changed = model.moe[1].experts.down_proj
        before = changed.clone()
        writes: list[Callable[[], object]] = [
            lambda: changed.mul_(2.0),
            lambda: changed.data.copy_(2.0 * before),
            lambda: changed.numpy().__imul__(2.0),
        ]
        for write in writes:
            write()
            with pytest.raises(moepass.InputError, match=r"expert weights of moe\.1\.experts were changed"):
                compiled(hidden)
            changed.data.copy_(before)
            assert torch.equal(compiled(hidden), expected)
        model.share_memory()
        assert torch.equal(compiled(hidden), expected)
        changed.data.mul_(2.0)
        with pytest.raises(moepass.InputError, match=r"load_state_dict\(state, assign=True\) on every rank"):
            compiled(hidden)
        state = {name: value.clone() for name, value in build_stack(OTHER, "all_to_all").state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert torch.equal(compiled(hidden), build_stack(OTHER)(hidden))


@pytest.mark.slow
def test_weights_that_change_after_the_first_run_are_an_error_not_a_wrong_result() -> None:
    run_ranks(2, _weights_change_too_late)


def _other_ranks_send_old_weights() -> str:
    model = build_stack(SMALL, "all_to_all")
    with torch.no_grad():
        compiled = compile_whole(model, transport="collective")
        hidden = hidden_rows(SMALL, 8, 0)
        compiled(hidden)
        if dist.get_rank() == 0:
            model.moe[1].experts.down_proj.data.mul_(2.0)
        with pytest.raises(moepass.MoepassError) as caught:
            compiled(hidden)
        return str(caught.value)


def _writes_that_torch_does_not_count() -> None:
    """Without `debug` they are not noticed: all ranks, this one included, use the weights of the first run."""
    model = build_stack(SMALL, "all_to_all")
    compiled = compile_whole(model, debug=False)
    hidden = hidden_rows(SMALL, 8, dist.get_rank())
    with torch.no_grad():
        expected = compiled(hidden)
        for layer in model.moe:
            layer.experts.down_proj.data.mul_(2.0)
        assert torch.equal(compiled(hidden), expected)
        model.moe[1].experts.down_proj.mul_(2.0)
        with pytest.raises(moepass.InputError, match=r"expert weights of moe\.1\.experts were changed"):
            compiled(hidden)


@pytest.mark.slow
def test_without_debug_torchs_count_of_writes_alone_tells() -> None:
    run_ranks(2, _writes_that_torch_does_not_count)


@pytest.mark.slow
def test_where_ranks_gather_weights_that_one_of_them_changes_are_an_error_on_all() -> None:
    for message in run_ranks(2, _other_ranks_send_old_weights):
        assert "the expert weights of moe.1.experts were changed after their first run" in message


def _inference_tensors_change() -> None:
    with torch.inference_mode():
        model, hidden = build_stack(SMALL, "all_to_all"), hidden_rows(SMALL, 8, 0)
        compiled = compile_whole(model)
        compiled(hidden)
        model.moe[0].experts.gate_up_proj.mul_(2.0)
        with refused(moepass.InputError, name="moe.0.experts"):
            compiled(hidden)


@pytest.mark.slow
def test_changed_inference_tensors_are_an_error_too() -> None:
    run_ranks(2, _inference_tensors_change)


def _one_comes_too_late() -> list[str]:
    """Rank 0 runs alone and fails. The next runs fail as well, until there is a new group."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    compiled, hidden = compile_whole(build_stack(SMALL, "all_to_all"), timeout_s=0.5), hidden_rows(SMALL, 8, rank)
    texts = []
    with torch.no_grad():
        if rank == 1:
            store.wait(["gave up"])
        for _ in range(2 - rank):
            with pytest.raises(PeerError) as caught:
                compiled(hidden)
            texts.append(str(caught.value))
            store.set("gave up", "")
        group = dist.new_group()
        assert torch.equal(compile_whole(build_stack(SMALL, "all_to_all", group))(hidden), build_stack(SMALL)(hidden))
    return texts


@pytest.mark.slow
def test_ranks_that_missed_each_other_say_so_from_then_on_without_waiting() -> None:
    (first, again), (late,) = run_ranks(2, _one_comes_too_late)
    assert first.startswith(
        "rank 1 did not publish a list of blocks within 0.5 s; every rank of the group must compile"
    )
    assert again == first
    assert late == (
        f"the ranks of this group got out of step before, and cannot meet any more: {first}; start all ranks again, "
        "or let all of them use a new process group"
    )


def _one_rank_does_not_come() -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            compile_whole(build_stack(SMALL, "all_to_all"), timeout_s=1.0)(hidden_rows(SMALL, 8, 0))


@pytest.mark.slow
def test_a_rank_that_never_runs_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 did not publish a list of blocks within 1 s; every rank of the group"):
        run_ranks(2, _one_rank_does_not_come)


def _ranks_bring_other_models() -> list[str]:
    """Experts have 32 features on one rank and 48 on the other: unusual, but it runs."""
    config = dataclasses.replace(SMALL, width=32 if dist.get_rank() == 0 else 48)
    with torch.no_grad(), moepass.record_compilations() as compilations:
        model, hidden = build_stack(config, "all_to_all"), hidden_rows(SMALL, 8, dist.get_rank())
        assert torch.equal(compile_whole(model)(hidden), model(hidden))
    return [refusal.reason for refusal in compilations[0].plan.refusals]


@pytest.mark.slow
def test_ranks_with_other_shapes_keep_their_exchanges() -> None:
    for reasons in run_ranks(2, _ranks_bring_other_models):
        assert len(reasons) == 2
        for reason in reasons:
            assert "compute differently" in reason
            assert "64, 64] on cpu` on rank 0" in reason
            assert "96, 64] on cpu` on rank 1" in reason


def _refused_blocks_still_run(form: str) -> None:
    """There are more ranks than experts: no block is rewritten, and the exchanges stay."""
    config = dataclasses.replace(SMALL, experts=2, top_k=1)
    hidden = hidden_rows(config, 8, 0 if form == "all_reduce" else dist.get_rank())
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled: Callable[..., Any] = compile_whole(build_stack(config, form))
        output = compiled(hidden)
        plain: MoEStack = build_stack(config, form)
        assert torch.equal(output, plain(hidden))
    (compilation,) = compilations
    assert not compilation.plan.banks
    if dist.get_rank() > 0:  # rank 0 has no experts, hence nothing that looks like a block
        assert all("holds none of its 2 experts" in refusal.reason for refusal in compilation.plan.refusals)
        assert len(compilation.plan.refusals) == config.layers


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_reduce"])
def test_what_is_refused_runs_as_it_came(form: str) -> None:
    run_ranks(3, _refused_blocks_still_run, form)
