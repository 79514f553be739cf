"""Real ranks that agree in every run whether to gather weights or to exchange tokens."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import moepass
from moepass.passes.machine.hardware import with_emulated_link
from moepass.passes.schedule.dispatch import EXCHANGED, GATHERED, HYSTERESIS, choose_form
from moepass.runtime.execute.dispatching import FormStatistics
from moepass.runtime.profiles.hardware_profiles import load_hardware
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.moe_stack import StackConfig, build_stack
from tests.helpers.processes.adopted_stacks import SMALL, compile_whole, hidden_rows
from tests.helpers.processes.ranks import run_ranks
from tests.helpers.processes.workers import Worker, join_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared shards need memfd_create")

CROSSOVER = 10
ONE = dataclasses.replace(SMALL, layers=1)
# Tokens by step and rank. The means cross the crossover in both directions, also within its band (9.5, 10.5). Some
# ranks have no tokens, and some ranks alone would be on different sides of the crossover.
STEPS = [(8, 8), (12, 7), (10, 11), (20, 20), (11, 8), (9, 10), (10, 7), (0, 6), (12, 9), (30, 0), (0, 0), (16, 8)]


def _expected(steps: Sequence[Sequence[int]], crossover: int = CROSSOVER) -> list[str]:
    forms: list[str] = []
    for counts in steps:
        forms.append(choose_form(sum(counts), len(counts), crossover, HYSTERESIS, forms[-1] if forms else None))
    return forms


def test_the_steps_cross_the_crossover_and_stay_in_the_band() -> None:
    letters = "".join(form[0] for form in _expected(STEPS))
    assert letters == "eeegggeeegeg"


def _forms_of_runs(compilations: Sequence[moepass.Compilation]) -> FormStatistics:
    """Return the number of runs of each form, over all graphs."""
    total = FormStatistics()
    for compilation in compilations:
        assert not compilation.plan.refusals, compilation.plan.refusals
        forms = compilation.executor.forms
        assert forms is not None
        total.gathered_runs += forms.gathered_runs
        total.exchanged_runs += forms.exchanged_runs
        total.exchanged_compilations += forms.exchanged_compilations
    return total


def _run_steps(
    form: str, config: StackConfig, steps: Sequence[Sequence[int]], dynamic: bool | None, **options: Any
) -> list[str]:
    """Return the form of each step, and check its output: bit by bit with eager segments, else within a tolerance."""
    rank = dist.get_rank()
    full, parallel = build_stack(config), build_stack(config, form)
    torch._dynamo.config.capture_scalar_outputs = True
    chosen = {"lower": "eager", "debug": True, "timeout_s": 50, "all_to_all_below": CROSSOVER, **options}
    forms: list[str] = []
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled: Callable[..., Any] = torch.compile(
            build_stack(config, form), backend="asyncep", dynamic=dynamic, fullgraph=True, options=chosen
        )
        before = FormStatistics()
        for step, counts in enumerate(steps):
            hidden = hidden_rows(config, counts[rank], 100 * step + (0 if form == "all_reduce" else rank))
            output, exchanged = compiled(hidden), parallel(hidden)
            now = _forms_of_runs(compilations)
            assert now.gathered_runs + now.exchanged_runs == step + 1
            forms.append(EXCHANGED if now.exchanged_runs > before.exchanged_runs else GATHERED)
            reference = exchanged if forms[-1] == EXCHANGED else full(hidden)
            if chosen["lower"] == "eager":
                assert torch.equal(output, reference), f"step {step} with {counts} tokens, {forms[-1]}"
            else:
                torch.testing.assert_close(output, reference, atol=1e-5, rtol=1e-4)
            before = now
    return forms


def test_ranks_exchange_few_tokens_and_gather_for_many() -> None:
    steps = [(8, 8), (20, 8), (12, 5), (0, 8)]
    assert run_ranks(2, _run_steps, "all_to_all", ONE, steps, True) == [_expected(steps)] * 2
    assert set(_expected(steps)) == {GATHERED, EXCHANGED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dynamic"),
    [("all_to_all", None), ("all_to_all", False), ("all_gather", False)],
)
def test_all_ranks_take_the_same_form_in_every_run(form: str, dynamic: bool | None) -> None:
    # With static shapes every new count is a compilation.
    config, steps = (SMALL, STEPS) if dynamic is None else (ONE, [(8, 8), (20, 8), (8, 8), (12, 12), (8, 12), (0, 8)])
    assert run_ranks(2, _run_steps, form, config, steps, dynamic) == [_expected(steps)] * 2


def _estimated(config: StackConfig, steps: Sequence[Sequence[int]], bytes_per_s: float) -> list[str]:
    machine = with_emulated_link(load_hardware("8xh100-80g"), bytes_per_s)
    return _run_steps("all_to_all", config, steps, False, all_to_all_below=None, hardware=machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_per_s", "form"), [(1e6, EXCHANGED), pytest.param(1e15, GATHERED, marks=pytest.mark.slow)]
)
def test_a_profile_says_no_where_its_link_is_slow_whatever_shapes_ranks_compile_for(
    bytes_per_s: float, form: str
) -> None:
    steps = [(8, 5), (20, 8), (5, 20)]
    assert run_ranks(2, _estimated, ONE, steps, bytes_per_s) == [[form] * len(steps)] * 2


@pytest.mark.slow
def test_where_ranks_hold_the_same_tokens_they_agree_too() -> None:
    steps = [(8, 8), (12, 12), (9, 9), (8, 8), (11, 11)]
    assert run_ranks(2, _run_steps, "all_reduce", ONE, steps, None) == [_expected(steps)] * 2


def _with_inductor(form: str, steps: Sequence[Sequence[int]], dynamic: bool | None) -> list[str]:
    return _run_steps(form, ONE, steps, dynamic, lower="inductor")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dynamic"), [("all_to_all", False), ("all_gather", True)])
def test_with_inductor_both_forms_stay_close(form: str, dynamic: bool | None) -> None:
    steps = STEPS if dynamic else STEPS[:5]
    assert run_ranks(2, _with_inductor, form, steps, dynamic, timeout=400) == [_expected(steps)] * 2


def _compilations_by_step(lower: str) -> list[int]:
    """Return how often the exchanged form was compiled, after a step that gathers and after steps that exchange."""
    counts = []
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(build_stack(ONE, "all_to_all"), lower=lower, all_to_all_below=CROSSOVER, dynamic=True)
        for tokens in (20, 8, 5):
            compiled(hidden_rows(ONE, tokens, dist.get_rank()))
            counts.append(_forms_of_runs(compilations).exchanged_compilations)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_the_exchanged_form_is_compiled_before_a_run_needs_it(lower: str) -> None:
    assert run_ranks(2, _compilations_by_step, lower, timeout=280) == [[1, 1, 1]] * 2


def _exchanged_segments(form: str) -> list[int]:
    counts = []
    for layers in (2, 4):
        torch._dynamo.reset()
        config = dataclasses.replace(SMALL, layers=layers)
        with torch.no_grad(), moepass.record_compilations() as compilations:
            compiled = compile_whole(build_stack(config, form), lower="inductor", all_to_all_below=CROSSOVER)
            hidden = hidden_rows(config, 8, dist.get_rank())
            torch.testing.assert_close(compiled(hidden), build_stack(config)(hidden), atol=1e-5, rtol=1e-4)
        forms = compilations[0].executor.forms
        assert forms is not None
        assert forms.exchanged_runs == 1
        assert forms.exchanged_segments is not None
        counts.append(len(forms.exchanged_segments))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_to_all", "all_gather"])
def test_a_deep_model_is_no_more_to_compile_in_either_form(form: str) -> None:
    for few, more in run_ranks(2, _exchanged_segments, form, timeout=280):
        assert few == more <= 8


@pytest.mark.slow
def test_four_ranks_agree() -> None:
    steps = [(3, 9, 0, 20), (40, 0, 0, 0), (1, 2, 3, 4), (10, 10, 11, 12), (12, 12, 12, 12), (0, 0, 0, 0)]
    config = dataclasses.replace(SMALL, experts=6)
    assert run_ranks(4, _run_steps, "all_to_all", config, steps, None) == [_expected(steps)] * 4


Sequences = list[list[tuple[int, int]]]
_counts = st.sampled_from((0, 5, 8, 9, 11, 12, 30))
_sequences = st.lists(st.lists(st.tuples(_counts, _counts), min_size=6, max_size=12), min_size=2, max_size=2)


def _one_model_after_the_other(sequences: Sequences, transport: str) -> list[str]:
    forms = []
    for seed, steps in enumerate(sequences):
        torch._dynamo.reset()
        config = dataclasses.replace(SMALL, seed=seed)
        forms += _run_steps("all_to_all", config, steps, None, transport=transport)
    return forms


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "collective"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(sequences=_sequences)
def test_any_sequence_of_token_counts_stays_exact(transport: str, sequences: Sequences) -> None:
    """Run several models in one group: the form in which a model begins depends on the last run of the one before."""
    expected = _expected([counts for steps in sequences for counts in steps])
    assert run_ranks(2, _one_model_after_the_other, sequences, transport, timeout=200) == [expected] * 2


def _what_the_log_says() -> list[str]:
    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    logger, handler = logging.getLogger("moepass"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _run_steps("all_to_all", ONE, [(8, 7), (9, 9), (9, 14), (12, 12), (10, 9)], None)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line for line in lines if "from now on" in line]


@pytest.mark.slow
def test_a_change_of_form_is_logged_once() -> None:
    said = [
        "runs are exchanged from now on: 7.5 tokens per rank, the crossover is 10",
        "runs are gathered from now on: 11.5 tokens per rank, the crossover is 10",
    ]
    assert run_ranks(2, _what_the_log_says) == [said, said]


def _nothing_is_gathered_or_held_twice() -> tuple[int, int]:
    """Check that ranks whose runs are all exchanged never adopt their experts, and have no ring."""
    parameters = build_stack(ONE, "all_to_all")
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = compile_whole(parameters, all_to_all_below=100)
        for step in range(3):
            compiled(hidden_rows(SMALL, 8, step))
        first = compilations[0].executor
        assert first.ring is None
        memory = [value.untyped_storage().data_ptr() for value in parameters.parameters()]
        compiled(hidden_rows(SMALL, 300, 0))
        rings = {id(compilation.executor.ring) for compilation in compilations} - {id(None)}
        compiled(hidden_rows(SMALL, 8, 0))
    assert len(memory) == len(set(memory))
    return len(rings), _forms_of_runs(compilations).exchanged_runs


@pytest.mark.slow
def test_experts_are_adopted_in_the_first_run_that_gathers() -> None:
    assert run_ranks(2, _nothing_is_gathered_or_held_twice) == [(1, 4)] * 2


def _options_differ(crossovers: tuple[int | None, int | None]) -> str:
    below = crossovers[dist.get_rank()]
    compiled = compile_whole(build_stack(ONE, "all_to_all"), all_to_all_below=below, timeout_s=20)
    with torch.no_grad(), pytest.raises(PeerError) as caught:
        compiled(hidden_rows(SMALL, 8, 0))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("crossovers", [(10, 20), (None, 20), (20, None)])
def test_ranks_with_other_options_get_the_same_error_at_once(crossovers: tuple[int | None, int | None]) -> None:
    first, second = run_ranks(2, _options_differ, crossovers)
    assert first == second
    assert first.startswith("ranks disagree on the tokens per rank below which runs are exchanged: ")
    assert all(f"{crossover or 'none'} on rank {rank}" in first for rank, crossover in enumerate(crossovers))
    assert first.endswith("give all ranks the same hardware or all_to_all_below")


def _crossovers_differ_later() -> str:
    """Compile the model again on one rank, with another crossover: its banks are adopted, so only a run can show it."""
    model = build_stack(ONE, "all_to_all")
    hidden = hidden_rows(SMALL, 8, 0)
    with torch.no_grad():
        compile_whole(model, all_to_all_below=10)(hidden)
        torch._dynamo.reset()
        compiled = compile_whole(model, all_to_all_below=10 + dist.get_rank())
        with pytest.raises(PeerError) as caught:
            compiled(hidden)
        with pytest.raises(PeerError, match="ranks disagree"):
            compiled(hidden)
    return str(caught.value)


@pytest.mark.slow
def test_crossovers_that_differ_later_are_one_error_on_all() -> None:
    first, second = run_ranks(2, _crossovers_differ_later)
    assert first == second
    assert "10 (hysteresis 0.1) on rank 0, 11 (hysteresis 0.1) on rank 1; give all ranks the same" in first


def _other_layers() -> str:
    shallow, deep = (build_stack(dataclasses.replace(SMALL, layers=layers), "all_to_all") for layers in (1, 2))
    with torch.no_grad():
        compiled = [compile_whole(model, all_to_all_below=10) for model in (shallow, deep)]
        for run in compiled:
            run(hidden_rows(SMALL, 8, 0))
        with pytest.raises(PeerError) as caught:
            compiled[dist.get_rank()](hidden_rows(SMALL, 8, 0))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_run_different_layers_get_an_error() -> None:
    first, second = run_ranks(2, _other_layers)
    assert first == second
    assert first.startswith("ranks disagree on the layers that they are about to run without exchanges: moe.")


def _one_stays_away() -> tuple[str, str]:
    compiled = compile_whole(build_stack(ONE, "all_to_all"), all_to_all_below=10, timeout_s=3.0)
    hidden, store = hidden_rows(SMALL, 8, 0), dist.distributed_c10d._get_default_store()
    texts = []
    with torch.no_grad():
        compiled(hidden)
        compiled(hidden)
        if dist.get_rank() == 1:
            store.wait(["gave up"])
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                compiled(hidden)
            texts.append(str(caught.value))
        store.set("gave up", "")
    return texts[0], texts[1]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_an_error_within_the_timeout_on_all() -> None:
    (first, again), (late, later) = run_ranks(2, _one_stays_away)
    assert first == again == late == later
    assert first.startswith("rank 1 did not agree on a run within 3 s. Every rank of the group must call")


def _no_work(form: str, options: dict[str, Any]) -> str:
    model = build_stack(ONE, form)
    with torch.no_grad():
        compile_whole(model, **options)(hidden_rows(SMALL, 8, 0))
        with pytest.raises(moepass.InputError) as caught:
            moepass.gather_only_step(model)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "options"), [("all_to_all", {"all_to_all_below": 10}), ("all_reduce", {"transport": "collective"})]
)
def test_a_rank_without_work_runs_the_model(form: str, options: dict[str, Any]) -> None:
    for text in run_ranks(2, _no_work, form, options):
        assert text.startswith("gather_only_step cannot be used with MoEStack, because all ranks must agree on each of")


def _work(connection: Connection, store: str, rank: int) -> None:
    join_group(store, rank, 2)
    torch._dynamo.config.capture_scalar_outputs = True
    compiled = compile_whole(build_stack(ONE, "all_to_all"), all_to_all_below=10, timeout_s=20)
    while True:
        tokens = connection.recv()
        try:
            compiled(hidden_rows(SMALL, tokens, 0))
            connection.send("done")
        except PeerError as error:
            connection.send(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [pytest.param(8, marks=pytest.mark.slow), 20])
def test_a_rank_that_died_is_named_in_the_next_run(tokens: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Worker(_work, store, 0) as first, Worker(_work, store, 1) as second:
        for worker in (first, second):
            worker.tell(tokens)
        assert [first.hear(), second.hear()] == ["done", "done"]
        second.kill()
        first.tell(tokens)
        text = first.hear()
    assert text.startswith(
        "rank 1 has ended or dropped its model: the connection to it (agreements on runs) was lost while ranks"
    )
