"""Ranks that decide differently about a block of expert parallelism find out at once; equal ones wait for nobody."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_adoption import SMALL, _compile, _hidden

import moepass
from moepass.models.moe_stack import build_stack
from moepass.passes import localise
from moepass.passes.mock_run import ContractBroken
from moepass.runtime.decisions import Decisions, Left, check_decisions
from moepass.runtime.rendezvous import PeerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")


def test_what_ranks_do_not_agree_on_is_named() -> None:
    both = Decisions(("a", "b"), ())
    check_decisions([both, both])
    check_decisions([Decisions((), (Left("a", "of this"),)), Decisions((), (Left("a", "of that"),)), Decisions((), ())])
    for ranks in ([both, Decisions(("a",), (Left("b", "it is odd"),))], [both, Decisions(("a",), ())]):
        reason = "leaves it as it came, because it is odd" if ranks[1].left else "does not see it"
        with pytest.raises(PeerError, match=f"disagree on block b: rank 0 takes it, rank 1 {reason}; run all ranks"):
            check_decisions(ranks)
        with pytest.raises(PeerError, match=f"disagree on block b: rank 1 takes it, rank 0 {reason}; run all ranks"):
            check_decisions(ranks[::-1])


@contextmanager
def _refusing(*names: str) -> Iterator[None]:
    """The blocks with these names fail the proof of their local form on this rank, which each block gets."""
    real, real_text = localise.check_local_form, localise.block_text

    def check(block: Any, *args: Any) -> None:
        if block.name in names:
            raise ContractBroken("it fails by hand")
        real(block, *args)

    localise.check_local_form, localise.block_text = check, lambda *parts: object()
    try:
        yield
    finally:
        localise.check_local_form, localise.block_text = real, real_text


BLOCKS = ("moe.0.experts", "moe.1.experts")


def _one_refuses(names: tuple[str, ...]) -> tuple[str, float]:
    with torch.no_grad(), _refusing(*(names if dist.get_rank() == 1 else ())):
        compiled = _compile(build_stack(SMALL, "all_to_all"))
        started = time.perf_counter()
        with pytest.raises(PeerError) as caught:
            compiled(_hidden(SMALL, 8, 0))
        return str(caught.value), time.perf_counter() - started


@pytest.mark.parametrize("names", [BLOCKS[1:], pytest.param(BLOCKS, marks=pytest.mark.slow)])
def test_a_block_that_one_rank_refuses_is_an_error_on_all_at_once(names: tuple[str, ...]) -> None:
    (message, first), (other, second) = run_ranks(2, _one_refuses, names)
    assert message == other
    reason = "rank 1 leaves it as it came, because it fails by hand; its collectives stay"
    assert f"ranks disagree on block {names[0]}: rank 0 takes it, {reason}" in message
    assert max(first, second) < 30  # of the 50 that they may wait


def _all_refuse(counts: list[list[int]]) -> None:
    full = build_stack(SMALL)
    started = time.perf_counter()
    with torch.no_grad(), _refusing(*BLOCKS), moepass.record_compilations() as compilations:
        compiled = _compile(build_stack(SMALL, "all_to_all"))
        for step, tokens in enumerate(counts):
            hidden = _hidden(SMALL, tokens[dist.get_rank()], step)
            torch.testing.assert_close(compiled(hidden), full(hidden))
    assert len(compilations) == (2 if dist.get_rank() == 0 else 1)
    assert not any(compilation.plan.banks for compilation in compilations)
    assert time.perf_counter() - started < 40


@pytest.mark.slow
def test_what_all_ranks_refuse_one_may_compile_again_alone() -> None:
    """With the timeout at 50 s: nobody waits for a rank whose shapes do not change."""
    run_ranks(2, _all_refuse, [[8, 8], [9, 8], [7, 8]])


def _refuses_later() -> str:
    full = build_stack(SMALL)
    with torch.no_grad():
        compiled = _compile(build_stack(SMALL, "all_to_all"), timeout_s=2.0)
        hidden = _hidden(SMALL, 8, 0)
        assert torch.equal(compiled(hidden), full(hidden))
        dist.barrier()
        if dist.get_rank() == 0:
            return ""
        with _refusing(BLOCKS[0]), pytest.raises(PeerError) as caught:
            compiled(_hidden(SMALL, 9, 0))
        return str(caught.value)


@pytest.mark.slow
def test_a_block_that_is_refused_later_is_an_error_within_the_timeout() -> None:
    _, message = run_ranks(2, _refuses_later)
    assert "rank 0 did not publish a list of blocks within 2 s" in message
    assert "block moe.0.experts, which all ranks took before, stays as it came in this graph, because it" in message


def _one_is_not_compiled() -> None:
    hidden, full = _hidden(SMALL, 8, 0), build_stack(SMALL)
    model = build_stack(SMALL, "all_to_all")
    with torch.no_grad(), _refusing(*BLOCKS):
        run = _compile(model, timeout_s=2.0) if dist.get_rank() == 0 else model
        for _ in range(2):
            torch.testing.assert_close(run(hidden), full(hidden))


@pytest.mark.slow
def test_a_rank_that_does_not_compile_is_waited_for_once_where_nothing_was_taken() -> None:
    run_ranks(2, _one_is_not_compiled)


def _the_next_model_is_taken() -> None:
    """Rank 1 runs the first model as it is, where rank 0 finds nothing to take; both compile the second one."""
    hidden, full = _hidden(SMALL, 8, 0), build_stack(SMALL)
    first, second = build_stack(SMALL, "all_to_all"), build_stack(SMALL, "all_to_all")
    with torch.no_grad():
        with _refusing(*BLOCKS):
            run = _compile(first, timeout_s=0.5) if dist.get_rank() == 0 else first
            torch.testing.assert_close(run(hidden), full(hidden))
        torch._dynamo.reset()
        assert torch.equal(_compile(second)(hidden), full(hidden))


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_with_nothing_to_take_can_meet_the_others_later() -> None:
    run_ranks(2, _the_next_model_is_taken)
