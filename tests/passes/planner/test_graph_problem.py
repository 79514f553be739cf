"""Plans of graphs that are described only by their costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.cost.graph_cost import cost
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.placed_model import PlacedModel
from moepass.passes.ir.plan import BankSpec, MoEBlock, Plan, SlotStay, Step
from moepass.passes.ir.planner_decisions import Decisions, DeviceMemory
from moepass.passes.ir.protocol import PassContext
from moepass.passes.machine.hardware import Figure, Hardware, with_emulated_link, with_ranks, without_emulation
from moepass.passes.machine.times import gather_seconds, work_seconds
from moepass.passes.planner.graph_problem import plan_graph
from moepass.passes.planner.model_problem import execution_with_copies
from moepass.runtime.profiles.hardware_profiles import load_hardware

H100 = load_hardware("1xh100-80g")
BANK_BYTES = 10**8
EXPERTS, OTHERS = Cost("1e12", "1e6"), Cost("2e12", "1e6")


def _plan(names: tuple[str, ...], dtype: str = "bfloat16") -> Plan:
    """Return a plan of consecutive blocks, each in a segment that computes the same again; equal names share a bank."""
    indices = {name: index for index, name in enumerate(dict.fromkeys(names))}
    blocks = tuple(
        MoEBlock(name, "grouped_mm", 8, 2, 64, 32, True, "bfloat16", BANK_BYTES, (), indices[name], cost=EXPERTS)
        for name in names
    )
    banks = tuple(BankSpec(index, name, "host", BankFormat.plain(BANK_BYTES), ()) for name, index in indices.items())
    steps: list[Step] = []
    for name in names:
        steps += [Step(op, name, indices[name], 0) for op in ("prefetch", "acquire")]
        steps += [Step("segment", "segment", cost=OTHERS), Step("release", name, indices[name], 0)]
    stays = tuple(
        SlotStay(name, indices[name], 0, None if index == 0 else index - 1) for index, name in enumerate(names)
    )
    return Plan(
        blocks=blocks, banks=banks, slots=1, slot_bytes=BANK_BYTES, slot_stays=stays, steps=tuple(steps),
        cost=OTHERS, dtype=dtype,
    )  # fmt: skip


def _compute(plan: Plan, hardware: Hardware = H100) -> float | None:
    return plan_graph(plan, {}, hardware=hardware).compute_seconds


def test_a_bank_that_is_read_twice_is_counted_once_each_time() -> None:
    experts = work_seconds(H100, "bf16", 1e12, 1e6, "grouped_gemm")
    dense_seconds = work_seconds(H100, "bf16", 1e12, 0.0)
    assert _compute(_plan(("a", "b"))) == pytest.approx(2 * (experts + dense_seconds))
    assert _compute(_plan(("a", "a"))) == pytest.approx(2 * (experts + dense_seconds))


def test_work_outside_blocks_runs_at_the_rate_of_its_type() -> None:
    rates = {"bf16": Figure(1e15, "user"), "fp32": Figure(1e13, "user")}
    both = dataclasses.replace(H100, flops=rates)
    of_bf16, of_fp32 = (_compute(_plan(("a",), dtype), both) for dtype in ("bfloat16", "float32"))
    expected = work_seconds(both, "fp32", 1e12) - work_seconds(both, "bf16", 1e12)
    assert of_bf16 is not None
    assert of_fp32 is not None
    assert of_fp32 - of_bf16 == pytest.approx(expected)
    # A graph without blocks has no other information.
    dense = Plan(steps=(Step("segment", "segment", cost=OTHERS),), cost=OTHERS, dtype="float32")
    assert _compute(dense, both) == pytest.approx(work_seconds(both, "fp32", 2e12))


def test_a_threshold_that_is_not_known_says_why() -> None:
    made = plan_graph(_plan(("a",)), {}, hardware=H100)
    assert made.threshold_tokens is None
    assert made.source("threshold_tokens").startswith("not known: it is predicted from the sizes of layers")


@pytest.mark.parametrize(
    ("dtype", "why"),
    [("float32", "has no fp32 rate"), ("", "has no GEMMs"), ("float64", "dtype is 'float64'; it must be one of")],
)
def test_a_type_without_a_rate_is_said(dtype: str, why: str) -> None:
    only = dataclasses.replace(H100, flops={"bf16": Figure(1e15, "user")})
    made = plan_graph(_plan(("a",), dtype), {}, hardware=only)
    assert made.step_seconds is None
    assert why in made.source("step_seconds")


def _captured(dtype: torch.dtype) -> GraphModule:
    def function(ids: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (rows @ weight).to(torch.bfloat16)[ids]

    inputs = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 4, dtype=dtype), torch.zeros(4, 4, dtype=dtype)
    return make_fx(function, tracing_mode="fake")(*inputs)


def test_the_type_of_a_graph_is_that_of_its_gemms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert f"torch.{cost(_captured(dtype), Plan(), PassContext()).plan.dtype}" == str(dtype)


def test_copies_slow_graphs_and_models_down_alike() -> None:
    """Memory traffic is slowed by its own factor, for the fraction of the time in which a link really copies."""
    slowing = dataclasses.replace(H100.overlap, gemm=Figure(1.0, "user"), memory=Figure(2.0, "user"))
    hardware = with_emulated_link(dataclasses.replace(H100, overlap=slowing), 1e9, ("host",))
    plan = dataclasses.replace(_plan(("a", "b")), slots=2)
    bound_by_memory = Cost("2e6", "1e12")
    steps = tuple(
        dataclasses.replace(step, cost=bound_by_memory) if step.op == "segment" else step for step in plan.steps
    )
    blocks = tuple(dataclasses.replace(block, cost=Cost()) for block in plan.blocks)
    slowed = plan_graph(dataclasses.replace(plan, steps=steps, blocks=blocks), {}, hardware=hardware)
    assert slowed.step_seconds is not None
    assert slowed.compute_seconds is not None
    assert slowed.exposed_seconds is not None
    copying = 2 * gather_seconds(without_emulation(hardware), BANK_BYTES, "host")
    # While copies run, half of the time is lost.
    assert slowed.step_seconds == pytest.approx(slowed.compute_seconds + copying / 2, rel=0.01)


@pytest.mark.parametrize("transport", ["pull", "collective"])
def test_computation_is_slower_while_its_transport_copies(transport: str) -> None:
    slowing = dataclasses.replace(H100.overlap, gemm=Figure(2.0, "user"))
    true = with_ranks(dataclasses.replace(H100, overlap=slowing), 8)
    slow = with_emulated_link(true, 1e9)
    machine = execution_with_copies(slow, "peer", transport, BankFormat.plain(BANK_BYTES), 0.0)
    ratio = gather_seconds(true, BANK_BYTES, "peer", transport) / gather_seconds(slow, BANK_BYTES, "peer", transport)
    assert machine.copy_slowdown == pytest.approx(1 + ratio)


def test_decoding_takes_time_and_two_buffers() -> None:
    plan = _plan(("a", "b"))
    encoded = BankFormat(BANK_BYTES // 2, BANK_BYTES // 2, BANK_BYTES, "packed")
    banks = tuple(dataclasses.replace(bank, format=encoded) for bank in plan.banks)
    plain, decoded = (plan_graph(variant, {}, _weights()) for variant in (plan, dataclasses.replace(plan, banks=banks)))
    assert plain.memory is not None
    assert decoded.memory is not None
    assert decoded.memory.slot_bytes == plain.memory.slot_bytes + 2 * (BANK_BYTES // 2)
    # A single slot hides no copy into it, and no decode, which reads half a bank and writes a bank. But copies into
    # encoded buffers take place while experts are computed.
    assert plain.exposed_seconds == pytest.approx(2 * gather_seconds(H100, BANK_BYTES, "host"), rel=0.01)
    decoding = BANK_BYTES * 3 / 2 / (H100.memory_bytes_per_s.value * 0.82)
    assert decoded.exposed_seconds == pytest.approx(2 * decoding, rel=0.01)


def _weights() -> PlacedModel:
    known = plan_graph(_plan(("a",)), {}, hardware=H100)
    return PlacedModel(known, (("a", 0), ("b", 1)), DeviceMemory(500.0, 0.0, 0.0), 0, "bf16", hardware=H100)


def _placed(known: Decisions) -> PlacedModel:
    return PlacedModel(known, (("a", 0),), DeviceMemory(500.0, 0.0, 0.0), 3000, "bf16", hardware=H100)


def test_memory_of_a_placed_model_includes_banks_of_other_graphs() -> None:
    plan = _plan(("a",))
    made = plan_graph(plan, {}, _placed(plan_graph(plan, {}, hardware=H100)))
    assert made.memory is not None
    assert (made.memory.resident_bytes, made.memory.slot_bytes) == (3500, BANK_BYTES)
    assert "activations are not counted" in made.source("memory")
