"""The crossover between gathered weights and exchanged tokens, on synthetic machines."""

from __future__ import annotations

import dataclasses

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.cost import Cost
from moepass.passes.ir.plan import BankSpec, MoEBlock, Plan, TensorSpec
from moepass.passes.machine.hardware import Hardware, with_emulated_link
from moepass.passes.machine.times import collective_seconds, gather_seconds, memory_seconds
from moepass.passes.planner.all_to_all_crossover import MOST_TOKENS, CrossoverEstimate, exchange_seconds
from moepass.runtime.profiles.hardware_profiles import load_hardware

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 4
BANK_BYTES = 3 * EXPERTS * HIDDEN * WIDTH * 2
MACHINE = load_hardware("8xh100-80g")
TOKENS = sympy.Symbol("s0")


def _plan(form: str = "all_to_all", tokens: int | str = "s0", hint: int = 4096) -> Plan:
    expert_flops = f"{6 * HIDDEN * WIDTH * TOP_K}*{tokens}"
    block = MoEBlock(
        name="experts",
        form="grouped_mm",
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=WIDTH,
        gated=True,
        dtype="bfloat16",
        weight_bytes=BANK_BYTES,
        gemms=("up", "down"),
        bank=0,
        parallel=form,
        cost=Cost(expert_flops, str(BANK_BYTES)),
    )
    blocks = tuple(dataclasses.replace(block, name=f"experts {index}", bank=index) for index in range(LAYERS))
    tensors = (TensorSpec("weight_0", (EXPERTS, 3 * WIDTH, HIDDEN), "bfloat16", 0),)
    banks = tuple(
        BankSpec(index, f"bank {index}", "peer", BankFormat.plain(BANK_BYTES), tensors) for index in range(LAYERS)
    )
    dense_flops = f"{8 * HIDDEN * HIDDEN * LAYERS}*{tokens}"
    cost = Cost(f"{LAYERS}*{expert_flops} + {dense_flops}", str(LAYERS * BANK_BYTES))
    return Plan(blocks=blocks, banks=banks, cost=cost, sizes=(("s0", hint),) if tokens == "s0" else ())


def _estimate(hardware: Hardware = MACHINE, slots: int = 2, **changed: object) -> CrossoverEstimate:
    plan = _plan(**changed)  # type: ignore[arg-type]
    tokens = TOKENS if plan.sizes else sympy.Integer(changed["tokens"])
    return CrossoverEstimate(plan, tokens, hardware, ranks=8, slots=slots)


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(["all_to_all", "all_gather", "all_reduce"]),
    slots=st.integers(1, 3),
    rate=st.floats(1e9, 1e12),
)
def test_gathering_is_the_faster_form_from_the_crossover_on_and_not_before(form: str, slots: int, rate: float) -> None:
    estimate = _estimate(with_emulated_link(MACHINE, rate), slots, form=form)
    crossover = estimate.crossover_tokens()
    at, before = estimate.seconds(crossover), estimate.seconds(crossover - 1)
    assert at.gathered <= at.exchanged or crossover == MOST_TOKENS
    assert crossover == 1 or before.gathered > before.exchanged


def test_the_parts_are_those_of_the_times_of_the_profile() -> None:
    both = _estimate().seconds(100.0)
    assert both.transfer == pytest.approx(LAYERS * gather_seconds(MACHINE, BANK_BYTES, "peer"))
    assert both.gathered == both.transfer  # 100 tokens hide nothing
    rows = 100 * TOP_K * HIDDEN * 2
    counts = collective_seconds(MACHINE, "all_to_all", 8 * EXPERTS)
    regrouping = memory_seconds(MACHINE, 4 * rows)  # rows are sorted by expert and back, each time read and written
    exchanged = 2 * collective_seconds(MACHINE, "all_to_all", rows) + counts + regrouping
    assert both.exchange == pytest.approx(LAYERS * exchanged)


def test_a_slower_link_for_banks_moves_the_crossover_up() -> None:
    crossovers = [_estimate(with_emulated_link(MACHINE, rate)).crossover_tokens() for rate in (400e9, 100e9, 25e9)]
    assert crossovers == sorted(set(crossovers))


def test_one_slot_has_a_higher_crossover() -> None:
    assert _estimate(slots=1).crossover_tokens() > _estimate(slots=2).crossover_tokens()


def test_a_graph_for_one_number_of_tokens_has_the_crossover_of_the_one_for_any() -> None:
    crossover = _estimate().crossover_tokens()
    fixed = _estimate(tokens=4096).crossover_tokens()
    assert fixed == pytest.approx(crossover, rel=0.05)


def test_forms_exchange_the_documented_bytes() -> None:
    blocks = {form: _plan(form).blocks[0] for form in ("all_to_all", "all_gather", "all_reduce")}
    row = 64 * HIDDEN * 2
    gathered = collective_seconds(MACHINE, "all_gather", 8 * row) + collective_seconds(
        MACHINE, "reduce_scatter", 8 * row
    )
    assert exchange_seconds(MACHINE, blocks["all_gather"], 64) == pytest.approx(gathered)
    assert exchange_seconds(MACHINE, blocks["all_reduce"], 64) == pytest.approx(
        collective_seconds(MACHINE, "all_reduce", row)
    )


def test_ranks_with_the_same_tokens_share_their_experts_work_out_when_they_exchange() -> None:
    shared, exchanged = (_estimate(form=form).seconds(1e5) for form in ("all_reduce", "all_to_all"))
    assert shared.gathered == exchanged.gathered
    assert shared.exchanged - shared.exchange < exchanged.exchanged - exchanged.exchange
    assert _estimate(form="all_reduce").crossover_tokens() == MOST_TOKENS
