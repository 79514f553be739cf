"""The plan as data: conversion to JSON and back, equal digests everywhere, and the operators of graphs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.models.errors import InputError, MoepassError
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.plan import (
    PLAN_SCHEMA,
    BankSpec,
    Dispatch,
    MoEBlock,
    Plan,
    Refusal,
    SlotStay,
    Step,
    TensorSpec,
)
from moepass.passes.ir.segment import Lowering, NotLowered, Segment, SegmentUse
from moepass.passes.ir.slot_operations import BANK_TENSOR, acquire, decode, gather, prefetch, release
from tests.helpers.graphs.backend_helper import Stack, streamed, tokens, up_to

NAMES = st.text(max_size=12)
COUNTS = st.integers(0, 2**53)
MAYBE = st.none() | st.integers(0, 1000)
TENSORS = st.builds(
    TensorSpec,
    NAMES,
    st.lists(st.integers(0, 9999), max_size=4).map(tuple),
    st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    COUNTS,
)
COSTS = st.none() | st.builds(Cost, NAMES, NAMES, NAMES)
FORMATS = st.builds(BankFormat.plain, COUNTS) | st.builds(
    lambda link, more, slot, decoder: BankFormat(link + more, link, slot, decoder),
    *(COUNTS, st.integers(0, 2**20), COUNTS, st.text(min_size=1, max_size=12)),
)
PLANS = st.builds(
    Plan,
    strategy=NAMES,
    reason=NAMES,
    blocks=st.lists(
        st.builds(
            MoEBlock, NAMES, NAMES, COUNTS, MAYBE, COUNTS, COUNTS, st.booleans(), NAMES, COUNTS,
            st.lists(NAMES, max_size=3).map(tuple), MAYBE, cost=COSTS,
        ),
        max_size=3,
    ).map(tuple),
    refusals=st.lists(st.builds(Refusal, NAMES, NAMES, NAMES), max_size=3).map(tuple),
    banks=st.lists(
        st.builds(BankSpec, COUNTS, NAMES, NAMES, FORMATS, st.lists(TENSORS, max_size=3).map(tuple)), max_size=3
    ).map(tuple),
    slots=COUNTS,
    slot_bytes=COUNTS,
    slot_stays=st.lists(
        st.builds(SlotStay, NAMES, COUNTS, COUNTS, MAYBE, st.lists(NAMES, max_size=2).map(tuple)), max_size=3
    ).map(tuple),
    steps=st.lists(st.builds(Step, NAMES, NAMES, MAYBE, MAYBE, COSTS), max_size=3).map(tuple),
    segments=st.lists(
        st.builds(
            Segment, NAMES, NAMES, st.lists(NAMES, max_size=2).map(tuple),
            st.lists(st.builds(SegmentUse, NAMES, st.lists(NAMES, max_size=2).map(tuple)), max_size=2).map(tuple),
            COSTS,
            st.none() | st.builds(
                Lowering, NAMES, st.none() | st.builds(NotLowered, NAMES, NAMES, NAMES, NAMES)
            ),
        ),
        max_size=2,
    ).map(tuple),
    cost=COSTS,
    sizes=st.lists(st.tuples(NAMES, COUNTS), max_size=3).map(tuple),
    uncosted=st.lists(NAMES, max_size=3).map(tuple),
    dispatch=st.none() | st.builds(Dispatch, COUNTS, st.floats(0, 1), NAMES, NAMES),
)  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert again.digest() == plan.digest()
    assert hash(again) == hash(plan)
    assert json.loads(text)["schema"] == PLAN_SCHEMA


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(PLANS, PLANS)
def test_plans_have_the_same_digest_exactly_if_they_are_equal(first: Plan, second: Plan) -> None:
    assert (first.digest() == second.digest()) == (first == second)


def test_any_changed_field_changes_the_digest() -> None:
    plan = _real_plan()
    values = {"str": "changed", "int": 12345, "tuple": (), "Cost": Cost("7*s0")}
    values["NoneType"] = Dispatch(100, 0.1, "2*s3 + 1", "because")
    for field in dataclasses.fields(Plan):
        old = getattr(plan, field.name)
        new = values[type(old).__name__]
        if old != new:
            assert dataclasses.replace(plan, **{field.name: new}).digest() != plan.digest(), field.name


def test_gather_plans_contain_only_the_order_of_banks() -> None:
    plan = _real_plan()
    shifted = tuple(dataclasses.replace(stay, bank=stay.bank + 3, block="other") for stay in plan.slot_stays)
    assert dataclasses.replace(plan, slot_stays=shifted, blocks=(), steps=()).gathers() == plan.gathers()
    first, second, *remaining = plan.slot_stays
    for stays in ((first, dataclasses.replace(second, slot=first.slot), *remaining), plan.slot_stays[:-1]):
        assert dataclasses.replace(plan, slot_stays=stays).gathers() != plan.gathers()
    repeated = dataclasses.replace(second, bank=first.bank)
    assert dataclasses.replace(plan, slot_stays=(first, repeated, *remaining)).gathers() != plan.gathers()
    assert plan.gathers().digest < 2**63
    assert str(plan.gathers()) == "3 gathers through 2 slots"


@functools.cache
def _real_plan() -> Plan:
    return up_to("partition", streamed(Stack("batched_mm", depth=3), tokens()).module).plan


def test_a_real_plan_survives_json_and_is_complete() -> None:
    plan = _real_plan()
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan.blocks) == len(plan.banks) == len(plan.slot_stays) == 3
    assert plan.distinct_segments == len(json.loads(plan.to_json())["segments"]) > 0
    assert plan.bank(1) is plan.banks[1]
    with pytest.raises(KeyError, match=r"bank 7 is not in this plan, which has \[0, 1, 2\]"):
        plan.bank(7)


@pytest.mark.slow
def test_the_digest_is_the_same_in_every_process() -> None:
    plan = _real_plan()
    program = "import sys; from moepass.passes.ir.plan import Plan; print(Plan.from_json(sys.stdin.read()).digest())"
    digests = {plan.digest()}
    for seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            input=plan.to_json(),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"slots": "two"}', '{"blocks": [{"name": "x"}]}', '{"schema": "moepass.plan/0"}', '{"schema": 3}'],
)
def test_invalid_plans_are_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        Plan.from_json(text)


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().slots = 3  # type: ignore[misc]


@pytest.mark.parametrize("operation", [gather, prefetch, decode, acquire, release])
def test_graph_operations_say_that_only_an_executor_runs_them(operation: object) -> None:
    keywords = {"bank": 0} if operation is gather else {"bank": 0, "slot": 0}
    if operation in (prefetch, decode):
        keywords["after"] = None  # type: ignore[assignment]
    with pytest.raises(MoepassError, match="is part of a graph that only the executor can run"):
        operation([torch.zeros(1)], **keywords)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bank_tensor_reads_one_tensor_of_a_shard(dtype: torch.dtype) -> None:
    wanted = torch.randn(3, 4, 5).to(dtype)
    raw = wanted.view(-1).view(torch.uint8)
    shard = torch.cat([torch.zeros(256, dtype=torch.uint8), raw, torch.zeros(7, dtype=torch.uint8)])
    arguments = (shard, 0, 0, "layer", 0, "up", 256, [3, 4, 5], dtype, torch.device("cpu"))
    got = BANK_TENSOR(*arguments)
    assert torch.equal(got, wanted)
    assert got.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr()
    torch.library.opcheck(BANK_TENSOR, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("sizes", "decoder", "problem"),
    [
        ((8, 8, 16), "", "without a decoder the three must be equal"),
        ((16, 8, 8), "", "without a decoder the three must be equal"),
        ((8, 9, 16), "packed", "9 on the link and 16 in the slot; the link can have at most the bytes at rest"),
        ((8, -1, 16), "packed", "no size can be negative"),
    ],
)
def test_a_format_that_no_bank_can_have_is_refused(sizes: tuple[int, int, int], decoder: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        BankFormat(*sizes, decoder)


def test_sizes_at_rest_on_the_link_and_in_the_slot_may_differ() -> None:
    encoded, plain = BankFormat(70, 60, 100, "packed"), BankFormat.plain(80)
    banks = tuple(
        BankSpec(index, str(index), "host", bank_format, ()) for index, bank_format in enumerate((encoded, plain))
    )
    stays = (SlotStay("a", 0, 0, None), SlotStay("b", 1, 1, None), SlotStay("c", 0, 0, 0))
    plan = Plan(banks=banks, slots=2, slot_bytes=100, slot_stays=stays)
    assert plan.encoded_buffer_bytes == 60
    assert plan.device_bank_bytes == 2 * 100 + 2 * 60
