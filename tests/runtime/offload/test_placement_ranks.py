"""A memory budget on real ranks: all choose the same layers, keep to the budget, and compute the right results."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moepass
from moepass.models.errors import InputError
from moepass.passes.machine.hardware import Figure, Hardware, TransferLink
from moepass.runtime.homes.options.home_options import HomeOptions
from moepass.runtime.offload.offload import OffloadReport
from moepass.runtime.ranks.rendezvous import PeerError
from tests.helpers.models.planned_models import TOKENS, planned_machine, planned_model
from tests.helpers.processes.ranks import run_ranks

BANK_BYTES = 8 * 3 * 64 * 32 * 4


def _machine() -> Hardware:
    link = TransferLink(Figure(2e7, "user"), Figure(1e-6, "user"))
    return dataclasses.replace(planned_machine(), peer=link, ranks=2)


def _home(name: str) -> HomeOptions:
    return {"peer": moepass.Peer, "hybrid": moepass.Hybrid}[name](timeout_s=50)


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """Return the warnings of the backend."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moepass")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _least_bytes(home: str) -> int:
    with pytest.raises(InputError, match="which is too small") as caught:
        moepass.offload_experts(
            planned_model(), home=_home(home), memory_budget=1000, hardware=_machine(), tokens=TOKENS
        )
    match = re.search(r"; use at least (\d+) bytes", str(caught.value))
    assert match
    return int(match[1])


def _placed(home: str, folder: Path | None, banks: float, lower: str) -> tuple[tuple[str, ...], int]:
    """Return the resident layers and slots for a budget of this many banks more than the least."""
    model = planned_model()
    ids = torch.randint(0, 64, TOKENS, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        expected = model(ids).logits
    least = _least_bytes(home)
    budget = least + int(banks * BANK_BYTES)
    wishes = {"home": _home(home), "memory_budget": budget, "hardware": _machine(), "tokens": TOKENS}
    if folder is None:
        report: OffloadReport = moepass.offload_experts(model, **wishes)  # type: ignore[arg-type]
    else:
        model = moepass.load_pretrained(folder, **wishes)  # type: ignore[arg-type]
        report = moepass.offload_report(model)
    with torch.no_grad(), _messages() as said, moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": lower})
        tolerance = 0.0 if lower == "eager" else 1e-5
        for _ in range(2):
            torch.testing.assert_close(compiled(ids).logits, expected, rtol=0.0, atol=tolerance)
    (compilation,) = compilations
    memory = compilation.plan.decisions.memory
    measured = compilation.report()
    assert memory is not None
    assert memory.peak_bytes - memory.activation_bytes < budget
    # Placement uses a formula for activations. A graph with few tokens may need more, and logs a warning then.
    assert any("activations of this graph take" in message for message in said) == (memory.peak_bytes > budget)
    # With shards on the device, each of two ranks reads half of every bank from its shard.
    ring_bytes = report.ring_bytes // 2 if home == "peer" else report.ring_bytes
    assert measured.slots.measured == ring_bytes
    held = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
    shards = 0 if home == "peer" else report.home_bytes  # in host memory
    assert sum(held.values()) - shards == memory.resident_bytes
    assert home == "hybrid" or memory.slot_bytes == ring_bytes
    assert compilation.plan.decisions.resident_layers == report.store.placed.decisions.resident_layers
    return report.resident_layers, report.store.slots


@pytest.mark.slow
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(("home", "lower"), [("peer", "inductor"), ("hybrid", "eager")])
def test_ranks_place_alike_within_the_budget_and_stay_exact(home: str, lower: str, loads: bool, tmp_path: Path) -> None:
    if loads:
        planned_model().save_pretrained(tmp_path)
    # A resident bank replaces its shard, so with slots without own experts half a bank suffices for one more.
    ranks = run_ranks(2, _placed, home, tmp_path if loads else None, {"peer": 0.5, "hybrid": 2.0}[home], lower)
    assert ranks[0] == ranks[1]
    stay, slots = ranks[0]
    assert stay or slots > 1  # the budget is used


def _reads_whole_banks() -> list[str]:
    """Return the warning for a graph that needs more than the budget that its layers were placed for."""
    model = planned_model()
    budget = _least_bytes("peer")
    moepass.offload_experts(model, home=_home("peer"), memory_budget=budget, hardware=_machine(), tokens=TOKENS)
    ids = torch.randint(0, 64, TOKENS)
    with torch.no_grad(), _messages() as said, moepass.record_compilations() as compilations:
        torch.compile(model, backend="asyncep", options={"lower": "eager"})(ids)
    memory = compilations[0].plan.decisions.memory
    assert memory is not None
    assert memory.peak_bytes > budget
    assert memory.slot_bytes == compilations[0].report().slots.measured
    return said


@pytest.mark.slow
def test_a_graph_that_reads_whole_banks_says_that_the_budget_is_exceeded() -> None:
    for said in run_ranks(2, _reads_whole_banks):
        (message,) = said
        assert re.search(r"a step needs \d+ bytes, more than the memory budget of \d+", message)
        assert "lower='inductor'" in message


def _all_stay() -> tuple[str, ...]:
    dense = sum(value.nbytes for value in planned_model().parameters()) - 4 * BANK_BYTES
    activations = _least_bytes("peer") - dense - 4 * BANK_BYTES // 2 - BANK_BYTES // 2
    budget = dense + activations + 4 * BANK_BYTES
    wishes = {"home": _home("peer"), "memory_budget": budget, "hardware": _machine(), "tokens": TOKENS}
    assert moepass.offload_experts(planned_model(), **wishes).layers == ()  # type: ignore[arg-type]
    without_profile = moepass.offload_experts(planned_model(), **{**wishes, "hardware": None})  # type: ignore[arg-type]
    return without_profile.layers


def test_if_all_banks_fit_no_memory_is_reserved_for_their_shards() -> None:
    assert run_ranks(2, _all_stay) == [(), ()]


def _differently_planned(differing: str) -> str:
    first, second = DIFFERING[differing]
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": TOKENS}
    wishes[differing] = second if dist.get_rank() else first
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(planned_model(), **wishes)  # type: ignore[arg-type]
    return str(caught.value)


DIFFERING = {
    "memory_budget": ("10MB", "1MB"),
    "tokens": ((2, 32), (2, 16)),
    "slots": (None, 2),
    "hardware": (_machine(), dataclasses.replace(_machine(), name="another")),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("differing", DIFFERING)
def test_ranks_that_plan_with_different_options_get_an_error(differing: str) -> None:
    """Include a rank whose plan moves nothing, so that it has no banks to compare."""
    first, second = run_ranks(2, _differently_planned, differing)
    assert first == second
    assert first.startswith("ranks disagree on ")
    assert f"give every rank the same {differing}" in first


def _failing_where_it_is_placed(wrong: dict[str, object]) -> tuple[str, str]:
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": TOKENS}
    with pytest.raises((InputError, PeerError)) as caught:
        moepass.offload_experts(planned_model(), **{**wishes, **(wrong if dist.get_rank() else {})})  # type: ignore[arg-type]
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("wrong", [{"memory_budget": 1000}, {"hardware": "none"}])
def test_an_error_of_placement_on_one_rank_reaches_the_others(wrong: dict[str, object]) -> None:
    (kind, error), (own_kind, own_error) = run_ranks(2, _failing_where_it_is_placed, wrong)
    assert (kind, own_kind) == ("PeerError", "InputError")
    assert error == f"rank 1 failed: InputError: {own_error}"


def _loads_with_other_tokens(folder: Path) -> str:
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": 32 + dist.get_rank()}
    with pytest.raises(PeerError) as caught:
        moepass.load_pretrained(folder, **wishes)  # type: ignore[arg-type]
    return str(caught.value)


def test_ranks_that_load_with_different_options_get_an_error(tmp_path: Path) -> None:
    planned_model().save_pretrained(tmp_path)
    for text in run_ranks(2, _loads_with_other_tokens, tmp_path):
        assert text == "ranks disagree on tokens: [1, 32] on rank 0, [1, 33] on rank 1; give every rank the same tokens"
