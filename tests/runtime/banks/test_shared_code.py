"""Equal layers and equal models share compiled code, and a warning appears where uncompiled code runs instead."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import moepass
from moepass.runtime.execute.bound_graph import SegmentError
from tests.helpers.graphs.backend_helper import BLOCKS, Stack, tokens
from tests.helpers.models.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="asyncep", options={"lower": "eager", "debug": True})


def _other(seed: int, depth: int = 2, form: str = "dense_bmm") -> Stack:
    """Return a model of the usual form with different weights."""
    torch.manual_seed(seed)
    model = Stack(form, depth=depth)
    for number, block in enumerate(model.blocks):
        block.load_state_dict(BLOCKS[form](seed=100 * seed + number).state_dict())
    return model


@pytest.mark.slow
def test_models_one_after_the_other_share_one_compilation() -> None:
    with moepass.record_compilations() as compilations:
        for seed in range(3):
            model = _other(seed)
            expected = model(tokens())
            report = moepass.offload_experts(model)
            compiled = _compiled(model)
            for _ in range(2):
                assert torch.equal(compiled(tokens()), expected)
            assert report.store.ring().statistics.copies > 0
            del model, compiled, report
            gc.collect()
    assert len(compilations) == 1


def test_models_side_by_side_share_code_but_no_ring() -> None:
    models = [_other(seed) for seed in range(3)]
    expected = [model(tokens()) for model in models]
    reports = [moepass.offload_experts(model, slots=2) for model in models]
    with moepass.record_compilations() as compilations:
        compiled = [_compiled(model) for model in models]
        for _ in range(3):
            for run, want in zip(compiled, expected, strict=True):
                assert torch.equal(run(tokens()), want)
    assert len(compilations) == 1
    assert len({id(report.store.ring()) for report in reports}) == 3
    assert {report.store.ring().statistics.ahead_wasted for report in reports} == {0}


@pytest.mark.slow
def test_a_model_with_other_slots_gets_a_plan_of_its_own() -> None:
    with moepass.record_compilations() as compilations:
        for slots in (1, 2):
            model = _other(slots, depth=3)
            expected = model(tokens())
            moepass.offload_experts(model, slots=slots)
            assert torch.equal(_compiled(model)(tokens()), expected)
    assert [item.plan.slots for item in compilations] == [1, 2]


def test_layers_compiled_one_by_one_share_one_compilation() -> None:
    model = _other(1, depth=12)
    expected = model(tokens())
    moepass.offload_experts(model)
    for block in model.blocks:
        block.compile(backend="asyncep", options={"lower": "eager", "debug": True})
    with moepass.record_compilations() as compilations:
        for _ in range(3):
            assert torch.equal(model(tokens()), expected)
    assert len(compilations) == 1
    with torch.no_grad():
        model.blocks[7].load_state_dict(_other(9, depth=12).blocks[7].state_dict())
        assert not torch.equal(model(tokens()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [12])
def test_layers_of_a_family_compiled_one_by_one_all_stream(layers: int) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=layers)
    inputs = tiny_inputs(model)
    expected = model(**inputs).logits
    report = moepass.offload_experts(model)
    for layer in model.model.layers:
        layer.compile(backend="asyncep", options={"lower": "eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(model(**inputs).logits, expected)
    assert report.store.ring().statistics.copies >= 2 * layers


@pytest.mark.slow
def test_tied_layers_run_code_that_was_compiled_for_untied_ones() -> None:
    tied = _other(2)
    tied.blocks[1].load_state_dict(tied.blocks[0].state_dict())
    for first, second in ((False, True), (True, False)):
        torch._dynamo.reset()
        for is_tied in (first, second):
            model = _other(2)
            if is_tied:
                model.blocks[1].up, model.blocks[1].down = model.blocks[0].up, model.blocks[0].down
            expected = model(tokens())
            moepass.offload_experts(model)
            compiled = _compiled(model)
            for _ in range(3):
                assert torch.equal(compiled(tokens()), expected)


def test_an_exception_names_the_bank_that_this_run_reads() -> None:
    """Raise in code that was compiled for another layer."""
    model = _other(1, depth=2)
    report = moepass.offload_experts(model)
    with moepass.record_compilations() as compilations:
        for block in model.blocks:
            block.compile(backend="asyncep", options={"lower": "eager"})
        model(tokens())
    assert len(compilations) == 1
    real = report.store.ring().acquire
    raised: list[str] = []
    for wanted in ("blocks.0", "blocks.1"):

        def failing(filled: object, bank: Any, slot: int, wanted: str = wanted) -> Any:
            tensors = real(filled, bank, slot)
            return (torch.zeros(1),) * len(tensors) if bank.name == wanted else tensors

        report.store.ring().acquire = failing  # type: ignore[method-assign]
        with pytest.raises(SegmentError) as caught:
            model(tokens())
        raised.append(str(caught.value))
    assert "blocks.1" not in raised[0]
    assert "blocks.1" in raised[1]


def test_code_that_dynamo_gave_up_on_is_loud_once() -> None:
    model = _other(1)
    expected = {count: model(tokens(count)) for count in (4, 5, 6)}
    moepass.offload_experts(model)
    compiled = torch.compile(model, backend="asyncep", dynamic=False, options={"lower": "eager"})
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (4, 5, 6, 5):
            assert torch.equal(compiled(tokens(count)), expected[count])
    messages = [str(item.message) for item in caught if "recompile_limit" in str(item.message)]
    assert len(messages) == 1
    assert "the experts of blocks.0 are copied without overlap" in messages[0]


def test_an_uncompiled_call_of_a_compiled_model_is_no_reason_to_warn() -> None:
    model = _other(1)
    moepass.offload_experts(model)
    _compiled(model)(tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens())


def test_code_of_one_model_refuses_the_banks_of_two_in_one_graph() -> None:
    def joined(*models: Stack) -> Stack:
        model = Stack("dense_bmm", depth=2)
        model.blocks = nn.ModuleList(source.blocks[0] for source in models)
        return model

    model = joined(_other(1), _other(2))
    moepass.offload_experts(model)
    _compiled(model)(tokens())
    parts = [_other(3), _other(4)]
    for source in parts:
        moepass.offload_experts(source)
    mixed = joined(*parts)
    with pytest.raises(moepass.InputError, match="one graph reads the banks of several offload_experts calls"):
        _compiled(mixed)(tokens())
