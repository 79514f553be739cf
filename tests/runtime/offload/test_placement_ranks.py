"""A memory budget on real ranks: all of them place alike, keep to the bytes, and compute what one process computes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_placement import TOKENS, machine, tiny

import moepass
from moepass.models.errors import InputError
from moepass.passes.machine.hardware import Figure, Hardware, TransferLink
from moepass.runtime.homes.registry.home_options import HomeOptions
from moepass.runtime.offload.offload import OffloadReport
from moepass.runtime.ranks.rendezvous import PeerError

BANK_BYTES = 8 * 3 * 64 * 32 * 4


def _machine() -> Hardware:
    link = TransferLink(Figure(2e7, "user"), Figure(1e-6, "user"))
    return dataclasses.replace(machine(), peer=link, ranks=2)


def _home(name: str) -> HomeOptions:
    return {"peer": moepass.Peer, "hybrid": moepass.Hybrid}[name](timeout_s=50)


def _least_bytes(home: str) -> int:
    with pytest.raises(InputError, match="which is too small") as caught:
        moepass.offload_experts(tiny(), home=_home(home), memory_budget=1000, hardware=_machine(), tokens=TOKENS)
    found = re.search(r"; (\d+) bytes would do", str(caught.value))
    assert found
    return int(found[1])


def _placed(home: str, folder: Path | None, banks: float) -> tuple[tuple[str, ...], int]:
    """The layers that stay, and slots, of a model that was placed with room for so many banks more than it needs."""
    model = tiny()
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
    with torch.no_grad(), moepass.record_compilations() as compilations:
        compiled = torch.compile(model, backend="asyncep", options={"lower": "eager"})
        for _ in range(2):
            assert torch.equal(compiled(ids).logits, expected)
    (compilation,) = compilations
    memory = compilation.plan.decisions.memory
    measured = compilation.report()
    assert memory is not None
    assert memory.peak_bytes <= budget
    assert measured.slots.measured == report.ring_bytes
    held = {id(value): value.nbytes for value in (*model.parameters(), *model.buffers())}
    shards = 0 if home == "peer" else report.home_bytes  # in host memory
    counted = sum(held.values()) - shards + report.ring_bytes
    assert counted == memory.resident_bytes + (memory.slot_bytes if home == "peer" else report.ring_bytes)
    assert compilation.plan.decisions.resident_layers == report.store.placed.decisions.resident_layers
    return report.resident_layers, report.store.slots


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("home", ["peer", "hybrid"])
def test_ranks_place_alike_within_the_budget_and_stay_exact(home: str, loads: bool, tmp_path: Path) -> None:
    if loads:
        tiny().save_pretrained(tmp_path)
    # A bank that stays takes the place of its shard: beside 2 slots' worth of shards, half a bank is enough for one.
    ranks = run_ranks(2, _placed, home, tmp_path if loads else None, {"peer": 0.5, "hybrid": 2.0}[home])
    assert ranks[0] == ranks[1]
    stay, slots = ranks[0]
    assert stay or slots > 1  # the room is used


def _all_stay() -> tuple[str, ...]:
    dense = sum(value.nbytes for value in tiny().parameters()) - 4 * BANK_BYTES
    activations = _least_bytes("peer") - dense - 4 * BANK_BYTES // 2 - BANK_BYTES
    budget = dense + activations + 4 * BANK_BYTES
    wishes = {"home": _home("peer"), "memory_budget": budget, "hardware": _machine(), "tokens": TOKENS}
    assert moepass.offload_experts(tiny(), **wishes).layers == ()  # type: ignore[arg-type]
    without_profile = moepass.offload_experts(tiny(), **{**wishes, "hardware": None})  # type: ignore[arg-type]
    return without_profile.layers


def test_where_all_banks_fit_no_room_is_kept_for_their_shards() -> None:
    assert run_ranks(2, _all_stay) == [(), ()]


def _differently_planned(differing: str) -> str:
    first, second = DIFFERING[differing]
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": TOKENS}
    wishes[differing] = second if dist.get_rank() else first
    with pytest.raises(PeerError) as caught:
        moepass.offload_experts(tiny(), **wishes)  # type: ignore[arg-type]
    return str(caught.value)


DIFFERING = {
    "memory_budget": ("10MB", "1MB"),
    "tokens": ((2, 32), (2, 16)),
    "slots": (None, 2),
    "hardware": (_machine(), dataclasses.replace(_machine(), name="another")),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("differing", DIFFERING)
def test_ranks_that_plan_by_other_things_are_told_which(differing: str) -> None:
    """Also where the plan of one rank moves nothing, so that it has no banks to compare."""
    first, second = run_ranks(2, _differently_planned, differing)
    assert first == second
    assert first.startswith("ranks disagree on ")
    assert f"give every rank the same {differing}" in first


def _failing_where_it_is_placed(wrong: dict[str, object]) -> tuple[str, str]:
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": TOKENS}
    with pytest.raises((InputError, PeerError)) as caught:
        moepass.offload_experts(tiny(), **{**wishes, **(wrong if dist.get_rank() else {})})  # type: ignore[arg-type]
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("wrong", [{"memory_budget": 1000}, {"hardware": "none"}])
def test_a_rank_that_cannot_be_placed_tells_the_others_why(wrong: dict[str, object]) -> None:
    (kind, told), (own_kind, own) = run_ranks(2, _failing_where_it_is_placed, wrong)
    assert (kind, own_kind) == ("PeerError", "InputError")
    assert told == f"rank 1 failed: InputError: {own}"


def _loads_with_other_tokens(folder: Path) -> str:
    wishes = {"home": _home("peer"), "memory_budget": "10MB", "hardware": _machine(), "tokens": 32 + dist.get_rank()}
    with pytest.raises(PeerError) as caught:
        moepass.load_pretrained(folder, **wishes)  # type: ignore[arg-type]
    return str(caught.value)


def test_ranks_that_load_by_other_things_are_told_which(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    for text in run_ranks(2, _loads_with_other_tokens, tmp_path):
        assert text == "ranks disagree on tokens: [1, 32] on rank 0, [1, 33] on rank 1; give every rank the same tokens"
