"""Slots that are never read are not computed, and lookups return the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers the operator of grouped GEMMs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moepass.passes.blocks.expert_gemms import is_grouped_gemm
from moepass.passes.graph.nodes import graph_inputs, is_call
from moepass.passes.ir.plan import Plan
from moepass.passes.ir.protocol import PassContext, PassResult, run_passes
from moepass.passes.slots.compute_read_slots import compute_read_slots
from tests.helpers.graphs.compared_models import compare_with_dynamic_rows, compare_with_model

EXPERTS, HIDDEN, WIDTH = 4, 8, 6
Ids = torch.Tensor
aten = torch.ops.aten


class SlotExperts(nn.Module):
    """Experts with biases on slots [capacity, experts, H]; `read` looks up their results by ids of slots."""

    def __init__(self, read: Callable[..., torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor] | None = None):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "up_bias": (WIDTH,), "down_bias": (HIDDEN,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape, generator=generator), False))
        self.read, self.work = read, work or torch.nn.functional.gelu

    def forward(self, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        each = slots.shape[0]
        rows = slots.permute(1, 0, 2).reshape(EXPERTS * each, HIDDEN)
        ends = torch.full((EXPERTS,), each, dtype=torch.int64).cumsum(0).to(torch.int32)
        expert = torch.arange(EXPERTS).unsqueeze(1).expand(EXPERTS, each).reshape(-1)
        gemm = torch.ops.transformers.grouped_mm_fallback
        inner = self.work(gemm(rows, self.up, ends) + self.up_bias[expert])
        outputs = gemm(inner, self.down, ends) + self.down_bias[expert]
        return self.read(outputs.view(EXPERTS, each, HIDDEN).view(-1, HIDDEN), ids)


def _zeros(outputs: torch.Tensor, rows: int = 1) -> torch.Tensor:
    return outputs.new_zeros(rows, HIDDEN)


# `ids` are those of slots, or the number of slots for rows that read nothing.
READS: dict[str, Callable[[torch.Tensor, Ids], torch.Tensor]] = {
    "zeros behind": lambda outputs, ids: torch.cat([outputs, _zeros(outputs)]).index_select(0, ids.view(-1)),
    "zeros in front": lambda outputs, ids: torch.cat([_zeros(outputs), outputs])[(ids + 1) % (len(outputs) + 1)],
    "another number": lambda outputs, ids: torch.cat([outputs, torch.full_like(_zeros(outputs), 0.3)])[ids],
    "padded": lambda outputs, ids: torch.nn.functional.pad(outputs, (0, 0, 0, 1), value=2.0)[ids],
    "from the end": lambda outputs, ids: torch.cat([outputs, _zeros(outputs)])[ids - len(outputs) - 1],
    "slots alone": lambda outputs, ids: outputs[ids % len(outputs)],
    "one by one": lambda outputs, ids: outputs[ids[:, 0] % len(outputs)] - outputs.index_select(0, ids[:, 1] // 2),
    "numbers on both sides": lambda outputs, ids: torch.cat([_zeros(outputs, 2), outputs, _zeros(outputs)])[ids + 2],
}
WORK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda inner: inner.softmax(-1),
    "norm": lambda inner: torch.nn.functional.layer_norm(inner, [WIDTH]),
    "halves": lambda inner: torch.cat([inner[:, : WIDTH // 2].sigmoid(), inner.chunk(2, dim=1)[1]], dim=1),
    "slots apart": lambda inner: torch.tanh(inner.view(EXPERTS, -1, WIDTH)).reshape(-1, WIDTH),
    "heads": lambda inner: inner.view(-1, 2, WIDTH // 2).softmax(1).view(-1, WIDTH),
}


def _inputs(tokens: int, top_k: int, each: int, seed: int = 0, dropped: float = 0.3) -> list[torch.Tensor]:
    """Return slots, and ids [tokens, top_k] of some of them; some slots are read twice."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randn(each, EXPERTS, HIDDEN, generator=generator)
    ids = torch.randint(0, EXPERTS * each, (tokens, top_k), generator=generator)
    nowhere = torch.rand(tokens, top_k, generator=generator) < dropped
    return [slots, torch.where(nowhere, EXPERTS * each, ids)]


def _check(model: nn.Module, inputs: Sequence[list[torch.Tensor]]) -> PassResult:
    result = compare_with_dynamic_rows(model, (compute_read_slots,), inputs, tolerance=1e-5)
    assert len(result.matches) == 1
    return result


def _rows(result: PassResult) -> list[Any]:
    return [node.meta["val"].shape[0] for node in result.module.graph.nodes if is_grouped_gemm(node)]


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("read", READS)
def test_lookups_return_the_same(read: str) -> None:
    inputs = [_inputs(5, 2, 4), _inputs(3, 2, 2, 1), _inputs(40, 2, 30, 2, dropped=1.0), _inputs(9, 2, 50, dropped=0.0)]
    result = _check(SlotExperts(READS[read]), inputs)
    inputs_of_graph = graph_inputs(result.module.graph)
    (ids,) = (node.meta["val"] for node in inputs_of_graph if getattr(node.meta["val"], "dtype", None) is torch.int64)
    assert [str(rows) for rows in _rows(result)] == [str(ids.numel())] * 2


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("work", WORK)
def test_row_operations_are_repeated(work: str) -> None:
    _check(SlotExperts(READS["zeros behind"], WORK[work]), [_inputs(5, 2, 4), _inputs(11, 2, 9, 1)])


def test_rows_that_are_read_are_counted() -> None:
    """Dropped rows belong to no expert, and are computed by none."""
    slots, ids = _inputs(6, 2, 9)
    model = SlotExperts(READS["zeros behind"])
    result = compare_with_model(model, (compute_read_slots,), [[slots, ids]], rtol=1e-5, dynamic=False)
    graph = result.module.graph
    (ends,) = {node.args[2] for node in graph.nodes if is_grouped_gemm(node)}
    graph.output_node().args = ((ends,),)
    result.module.recompile()
    input_of_type = {torch.float32: slots, torch.int64: ids}
    weights = iter([model.up, model.up_bias, model.down, model.down_bias])
    values = [node.meta["val"] for node in graph_inputs(graph)]
    outputs = result.module(
        *(input_of_type[v.dtype] if v.shape in (slots.shape, ids.shape) else next(weights) for v in values)
    )
    assert int(outputs[0][-1]) == int((ids < EXPERTS * 9).sum())


def test_a_slot_that_is_no_number_spoils_nothing_else() -> None:
    slots, ids = _inputs(6, 2, 9)
    slots[3, 1], slots[:, 2] = torch.nan, torch.inf
    ids[0, 0] = 9 + 3
    _check(SlotExperts(READS["zeros behind"]), [[slots, ids]])


def test_an_id_beyond_the_table_is_an_error_as_before() -> None:
    model = SlotExperts(READS["zeros behind"])
    slots, ids = _inputs(6, 2, 9)
    ids[3, 1] = EXPERTS * 9 + 1
    with pytest.raises(IndexError):
        model(slots, ids)
    with pytest.raises(IndexError):
        compare_with_dynamic_rows(model, (compute_read_slots,), [[slots, ids]], tolerance=1e-5, compare=False)


class CountedSlots(SlotExperts):
    """A variant whose number of slots is read by the host, and may be 0."""

    def forward(self, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        each = int((slots[:, 0, 0] > 0).sum().item())
        torch._check(each >= 0)
        first = torch.arange(each * EXPERTS * HIDDEN, dtype=slots.dtype).view(each, EXPERTS, HIDDEN).sin()
        return super().forward(first, ids.clamp(max=EXPERTS * each))


@pytest.mark.slow
@pytest.mark.parametrize("read", ["zeros behind", "numbers on both sides"])
def test_there_may_be_no_slots(read: str) -> None:
    _check(
        CountedSlots(READS[read]), [[slots.abs() * sign, ids] for sign in (1, -1) for slots, ids in [_inputs(6, 1, 4)]]
    )


@pytest.mark.slow
def test_inductor_lowers_lookups_without_slots() -> None:
    model = CountedSlots(READS["zeros behind"])
    compiled = torch.compile(model, backend="asyncep", options={"lower": "inductor"})
    slots, ids = _inputs(6, 1, 4)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for sign in (1, -1):
            inputs = (slots.abs() * sign, ids)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


class RowsAcross(SlotExperts):
    """Rows depend on each other between the GEMMs."""

    def __init__(self) -> None:
        super().__init__(READS["zeros behind"], lambda inner: inner - inner.mean(0))


KEPT: dict[str, Callable[[], nn.Module]] = {
    "slots are read whole": lambda: SlotExperts(lambda outputs, ids: outputs[ids % 9] + outputs.sum(0)),
    "rows see each other": RowsAcross,
    "places between the GEMMs": lambda: SlotExperts(READS["zeros behind"], lambda inner: inner.cumsum(0)),
    "numbers of rows": lambda: SlotExperts(READS["zeros behind"], lambda inner: inner * len(inner)),
    "looked up by what is computed": lambda: SlotExperts(
        READS["zeros behind"], lambda inner: inner.new_ones(9, WIDTH)[inner[:, 0].clamp(0, 8).long()] * inner
    ),
    "columns are looked up": lambda: SlotExperts(lambda outputs, ids: outputs.index_select(1, ids.view(-1) % HIDDEN)),
    "a mask": lambda: SlotExperts(lambda outputs, ids: outputs * (outputs > 0)),
    "other rows joined": lambda: SlotExperts(
        lambda outputs, ids: torch.cat([outputs, torch.arange(HIDDEN).unsqueeze(0).float()])[ids]
    ),
    "another type joined": lambda: SlotExperts(
        lambda outputs, ids: torch.cat([outputs, torch.zeros(1, HIDDEN, dtype=torch.float64)])[ids]
    ),
    "ids of what is read": lambda: SlotExperts(
        lambda outputs, ids: outputs[(outputs[ids[:, 0] % 9, 0] > 0).long()] * outputs[ids[:, 1] % 9]
    ),
}


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("name", KEPT)
def test_other_reads_of_slots_are_unchanged(name: str) -> None:
    result = compare_with_dynamic_rows(
        KEPT[name](), (compute_read_slots,), [_inputs(5, 2, 4), _inputs(6, 2, 5)], tolerance=1e-5
    )
    assert result.matches == ()


def test_slots_stay_where_something_else_hangs_on_them_though_nothing_reads_it() -> None:
    module = compare_with_dynamic_rows(SlotExperts(READS["slots alone"]), (), [_inputs(5, 2, 4)], tolerance=0.0).module
    last = [node for node in module.graph.nodes if is_grouped_gemm(node)][-1]
    with module.graph.inserting_after(last):
        unread = module.graph.call_function(torch.ops.aten.new_zeros.default, (last, [1, HIDDEN]))
    unread.meta["val"] = last.meta["val"].new_zeros(1, HIDDEN)
    assert run_passes((compute_read_slots,), module, Plan(), PassContext()).matches == ()


def test_more_lookups_than_slots_are_unchanged() -> None:
    result = compare_with_dynamic_rows(
        SlotExperts(READS["zeros behind"]),
        (compute_read_slots,),
        [_inputs(30, 2, 3), _inputs(31, 2, 4)],
        tolerance=1e-5,
    )
    assert result.matches == ()


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_ids_and_sizes(data: st.DataObject) -> None:
    tokens, each = data.draw(st.integers(2, 9)), data.draw(st.integers(6, 12))
    model = SlotExperts(READS[data.draw(st.sampled_from(sorted(READS)))])
    inputs = [_inputs(tokens, 2, each, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.0, 0.5, 1.0])))]
    if data.draw(st.booleans()):
        compare_with_dynamic_rows(model, (compute_read_slots,), inputs, tolerance=1e-5)
    else:
        compare_with_model(model, (compute_read_slots,), inputs, rtol=1e-5, dynamic=False)


class FilledSlots(SlotExperts):
    """Slots that are looked up in a table of tokens."""

    def forward(self, slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(slots.shape[0] * EXPERTS) % slots.shape[0]
        filled = slots[:, 0][tokens].view(EXPERTS, -1, HIDDEN).permute(1, 0, 2)
        return super().forward(filled, ids)


def test_slots_that_are_looked_up_are_never_in_memory() -> None:
    result = _check(FilledSlots(READS["zeros behind"]), [_inputs(5, 2, 4), _inputs(3, 2, 7)])
    first = next(node for node in result.module.graph.nodes if is_grouped_gemm(node))
    rows, numbers = first.args[0], first.args[0].args[1][0]  # type: ignore[union-attr, index]
    assert is_call(rows, aten.index.Tensor)
    assert is_call(numbers, aten.index.Tensor)
