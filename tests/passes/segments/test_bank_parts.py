"""Banks that arrive in parts: weights that only grouped GEMMs read, if all segments support parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from moepass.passes.finish import finish
from moepass.passes.ir.bank_format import BankFormat
from moepass.passes.ir.plan import BankSpec, Plan
from moepass.passes.ir.protocol import PassContext, PassResult
from moepass.passes.ir.segment import EXPERT_LOOP, INDUCTOR, TRITON, Lowering
from moepass.passes.ir.shards import slot_layout
from moepass.passes.pipeline import compile_graph
from moepass.passes.segments.bank_parts import bank_parts, weights_in_parts, with_bank_parts
from tests.helpers.graphs.backend_helper import BLOCKS, EXPERTS, Stack, streamed, tokens

ROWS, WIDTH = 6, 8


def _cut(form: str = "grouped_mm", depth: int = 2, bias: bool = True) -> PassResult:
    context = PassContext(disabled=frozenset({"bank_parts", "predict"}))
    return compile_graph(streamed(Stack(form, depth=depth, bias=bias), tokens()).module, context)


def _spread(plan: Plan, home: str = "peer", bounds: tuple[int, ...] = (0, 1, EXPERTS)) -> Plan:
    """Return `plan` with banks sharded over ranks with these bounds."""
    banks = tuple(dataclasses.replace(bank, home=home, expert_bounds=bounds) for bank in plan.banks)
    return dataclasses.replace(plan, banks=banks)


def _names_in_parts(plan: Plan) -> list[set[str]]:
    return [{bank.tensors[index].name for index in bank.in_parts} for bank in plan.banks]


def _least_slot_bytes(bank: BankSpec) -> int:
    return sum(tensor.nbytes * (EXPERTS - 1) // EXPERTS for tensor in bank.tensors)


def _shape_of(node: Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


@pytest.mark.slow
def test_weights_of_grouped_gemms_come_in_parts_and_tables_whole() -> None:
    cut = _cut()
    plan = with_bank_parts(cut.module, _spread(cut.plan))
    assert _names_in_parts(plan) == [{"up", "down"}] * 2
    assert plan.slot_bytes == max(slot_layout(bank).nbytes for bank in plan.banks) < cut.plan.slot_bytes
    assert plan.slot_bytes >= max(map(_least_slot_bytes, plan.banks))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", [form for form in BLOCKS if form != "grouped_mm"])
def test_other_forms_need_the_complete_bank(form: str) -> None:
    cut = _cut(form)
    plan = _spread(cut.plan)
    assert with_bank_parts(cut.module, plan) == plan


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "hybrid", "disk"])
def test_banks_outside_the_device_arrive_complete(home: str) -> None:
    cut = _cut()
    plan = _spread(cut.plan, home)
    assert with_bank_parts(cut.module, plan) == plan


@pytest.mark.slow
def test_an_encoded_bank_comes_whole() -> None:
    cut = _cut()
    spread = _spread(cut.plan)
    full = BankFormat(spread.slot_bytes, spread.slot_bytes, spread.slot_bytes, "plain_for_test")
    plan = dataclasses.replace(spread, banks=tuple(dataclasses.replace(bank, format=full) for bank in spread.banks))
    assert with_bank_parts(cut.module, plan) == plan


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("how", "takes"), [(EXPERT_LOOP, True), (TRITON, True), (INDUCTOR, False)])
def test_other_lowerings_need_complete_banks(how: str, takes: bool) -> None:
    cut = _cut()
    plan = with_bank_parts(cut.module, _spread(cut.plan))
    lowerings = {segment.name: Lowering(how) for segment in plan.segments}
    lowered = finish(plan, cut.module, lowerings, PassContext())
    assert [bool(names) for names in _names_in_parts(lowered)] == [takes, takes]
    assert lowered.slot_bytes == (plan.slot_bytes if takes else cut.plan.slot_bytes)


@pytest.mark.slow
def test_one_reader_that_needs_it_whole_is_enough() -> None:
    cut = _cut(depth=1)
    plan = with_bank_parts(cut.module, _spread(cut.plan))
    assert _names_in_parts(plan) == [{"up", "down"}]
    up = next(node for node in cut.module.graph.nodes if _shape_of(node) == (EXPERTS, 2 * 64, 32))
    with cut.module.graph.inserting_after(up):
        read = cut.module.graph.call_function(torch.ops.aten.sum.default, (up,))
    read.meta["val"] = up.meta["val"].sum()
    assert _names_in_parts(with_bank_parts(cut.module, plan)) == [{"down"}]


def test_the_pass_is_for_lowerings_that_take_parts() -> None:
    cut = _cut()
    plan = _spread(cut.plan)
    assert bank_parts(cut.module, plan, PassContext()).plan == plan
    parts = bank_parts(cut.module, plan, PassContext(runs_by_expert=True))
    assert parts.module is cut.module
    assert parts.plan == with_bank_parts(cut.module, plan)


def _segment(weights: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> GraphModule:
    """Return a grouped GEMM of `rows` with the weights that `weights` computes from the second input."""
    import transformers.integrations.moe  # noqa: F401  # registers the operator

    def compute(rows: torch.Tensor, given: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.transformers.grouped_mm_fallback(rows, weights(given), ends),)

    ends = torch.full((EXPERTS,), ROWS, dtype=torch.int32)
    return make_fx(compute, tracing_mode="fake")(torch.randn(ROWS, WIDTH), torch.randn(shape), ends)


@pytest.mark.parametrize(
    ("view", "shape", "comes_in_parts"),
    [
        (lambda w: w, (EXPERTS, WIDTH, WIDTH), True),
        (lambda w: w.transpose(1, 2), (EXPERTS, WIDTH, WIDTH), True),
        (lambda w: w.transpose(-1, -2), (EXPERTS, WIDTH, WIDTH), True),
        (lambda w: w.permute(0, 2, 1), (EXPERTS, WIDTH, WIDTH), True),
        (lambda w: w[:, :, :WIDTH], (EXPERTS, WIDTH, 2 * WIDTH), True),
        (lambda w: w.transpose(0, 1), (WIDTH, EXPERTS, WIDTH), False),
        (lambda w: w.permute(1, 0, 2), (WIDTH, EXPERTS, WIDTH), False),
        (lambda w: w[:EXPERTS], (2 * EXPERTS, WIDTH, WIDTH), False),
        (lambda w: w[EXPERTS:], (2 * EXPERTS, WIDTH, WIDTH), False),
        (lambda w: w.view(EXPERTS, WIDTH, WIDTH), (EXPERTS * WIDTH, WIDTH), False),
        (lambda w: w[:1].expand(EXPERTS, -1, -1), (EXPERTS, WIDTH, WIDTH), False),
        (lambda w: w * 2, (EXPERTS, WIDTH, WIDTH), False),
    ],
)  # fmt: skip
def test_views_that_leave_experts_where_they_are(
    view: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], comes_in_parts: bool
) -> None:
    assert (1 in weights_in_parts(_segment(view, shape))) == comes_in_parts


def test_rows_and_ends_never_come_in_parts() -> None:
    assert weights_in_parts(_segment(lambda w: w, (EXPERTS, WIDTH, WIDTH))) == {1}
